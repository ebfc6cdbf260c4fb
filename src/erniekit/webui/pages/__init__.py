"""The tabs of the page, one file each; gradio is imported in here and in app.py alone. Put together by app.py."""
