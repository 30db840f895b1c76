package catalogue

import (
	"tbcluster/instance/spec"
)

// Found is one model at one place on this node.
type Found struct {
	Model spec.Model `json:"model"`
	Copy  spec.Copy  `json:"copy"` // NodeID is empty: the agent fills it
}

// Options say where to look and how much to look at.
type Options struct {
	Home string            `json:"home"` // home of the person
	Env  map[string]string `json:"env"`  // HF_HOME, HF_HUB_CACHE, EXO_MODELS_DIRS, … as the person has them
	Dirs []string          `json:"dirs"` // model_dirs and what `models add` named: directories or files
	// Cache is the file in which digests are remembered; "" means
	// ~/.cache/tbcluster/digests.json.
	Cache string `json:"cache"`
}

// Limits of a scan.
const (
	MaxDepth   = 12
	MaxEntries = 200_000
	MaxModels  = 5_000
)

// Result is what a scan found.
type Result struct {
	Models []Found `json:"models"`
	// Problems are places that could not be looked at, for people.
	Problems []string `json:"problems"`
}

// Model is a model of the cluster: the same files on one node or several.
type Model struct {
	spec.Model
	Copies []spec.Copy
}
