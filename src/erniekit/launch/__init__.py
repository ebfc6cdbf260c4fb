"""From one `erniekit train` to a process per device on every machine, by torch's elastic agent."""
