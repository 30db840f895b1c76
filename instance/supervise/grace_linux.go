package supervise

import "time"

// failGrace: an engine that waits for a dead rank seldom notices SIGTERM.
const failGrace = 3 * time.Second
