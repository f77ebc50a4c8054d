"""Every bound of the pack."""

INTERRUPT_POLL_SECONDS = 0.05  #: a node that only awaits does not notice an interrupt
CANCEL_SECONDS = 2.0  #: for what was cancelled to end by itself
LOOK_SECONDS = 1.0  #: a question to the daemon, asked while ComfyUI waits
LOOK_AGE_SECONDS = 1.0  #: an answer that menus may use again
UNLOAD_SECONDS = 60.0  #: more than a model's drain, kill and settle deadlines are by default
REQUEST_SECONDS = 3600.0  #: one request; a user may interrupt it at any time
PREVIEW_SECONDS = 0.5  #: between two previews of sound or text that is being made
TEXT_ITEMS_MAX = 1024  #: of a tensor that is shown as text
