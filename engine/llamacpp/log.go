package llamacpp

import (
	"regexp"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// fatals are lines after which a rank cannot become ready or has died, the
// particular before the general: the first that fits is taken.
var fatals = []struct {
	text   string
	reason fault.Reason
	words  string // what it means; "" where the line says it itself
}{
	{"data is not within the file bounds", fault.ModelBroken, ""},
	{"invalid magic characters", fault.ModelBroken, ""},
	{"failed to open GGUF file", fault.FileMissing, ""},
	{"couldn't bind HTTP server socket", fault.PortInUse, ""},
	{"Failed to create server socket", fault.PortInUse, "it could not listen on its RPC port"},
	{"invalid device: RPC", fault.EngineFailed, "the server of another rank did not answer, or is of another version"},
	{"RPC server version mismatch", fault.EngineMismatch, ""},
	{"RPC protocol version mismatch", fault.EngineMismatch, ""},
	{"Remote RPC server crashed", fault.EngineFailed, "another rank is gone"},
	{"Failed to connect to", fault.EngineFailed, "another rank cannot be reached"},
	{"unknown model architecture", fault.Unsupported, ""},
	{"unable to allocate", fault.DoesNotFit, ""},
	{"failed to allocate", fault.DoesNotFit, ""},
	{"out of memory", fault.DoesNotFit, ""},
	{"mmap failed", fault.DoesNotFit, ""},
	{"error while loading shared libraries", fault.EngineFailed, ""},
	{"error while handling argument", fault.Usage, ""},
	{"error: invalid argument", fault.Usage, ""},
	{"error loading model:", fault.EngineFailed, ""},
	{"GGML_ASSERT", fault.EngineFailed, ""},
	{"terminate called", fault.EngineFailed, ""},
}

// prefix is what llama-server puts before its words: a time, a level, a source.
var prefix = regexp.MustCompile(`^(?:\d+(?:\.\d+)+\s+)?[EWID]\s+(?:\S+\s{1,16})?(?:\w+:\s+)?`)

// ReadLog interprets one line of a rank's log.
func (a *Adapter) ReadLog(_ spec.Rank, line string) spec.LogEvent {
	for _, f := range fatals {
		if !strings.Contains(line, f.text) {
			continue
		}
		said := strings.TrimSpace(prefix.ReplaceAllString(line, ""))
		if said == "" {
			said = strings.TrimSpace(line)
		}
		if f.words != "" {
			said = f.words + ": " + said
		}
		return spec.LogEvent{Fatal: said, Reason: string(f.reason)}
	}
	return spec.LogEvent{}
}
