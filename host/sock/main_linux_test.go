package sock

import (
	"testing"

	"tbcluster/host/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }
