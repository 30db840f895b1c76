package supervise

import "time"

// failGrace: an engine that is killed while it gives back memory leaves it
// stranded on macOS.
const failGrace = 20 * time.Second
