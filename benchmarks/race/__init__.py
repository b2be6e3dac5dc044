"""Every way to train over a slow link, at equal bytes and with an equal search: see `docs/reports/race.md`."""
