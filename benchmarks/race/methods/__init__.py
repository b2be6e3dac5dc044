"""Methods of training over a slow link, each a coroutine of one rank."""
