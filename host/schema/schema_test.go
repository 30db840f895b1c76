package schema

import (
	"testing"

	"tbcluster/api/fault"
)

func TestWhatANewerVersionWroteIsRefused(t *testing.T) {
	for text, refused := range map[string]bool{
		`{"schema":1,"x":[]}`: false, `{"schema":0}`: false, `{}`: false, `{"x":1}`: false, `not JSON`: false, ``: false, `[]`: false,
		`{"schema":2}`: true, `{"schema":2,"x":{"now":"an object"}}`: true, `{"x":"first","schema":99}`: true,
		`{"schema":1.5}`: true, `{"schema":99999999999999999999}`: true,
	} {
		err := Check([]byte(text), 1, "/state/file")
		if fault.Is(err, fault.StateTooNew) != refused || !refused && err != nil {
			t.Errorf("%s: %v, want refused: %t", text, err, refused)
		}
	}
}

func FuzzCheck(f *testing.F) {
	f.Add([]byte(`{"schema":1}`))
	f.Add([]byte(`{"schema":1e400}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := Check(data, 1, ""); err != nil && !fault.Is(err, fault.StateTooNew) {
			t.Fatal(err)
		}
	})
}
