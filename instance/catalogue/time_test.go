package catalogue

import "time"

var testTime = time.Unix(1_700_000_000, 0)
