package agent

import (
	"testing"

	"tbcluster/mesh/discover"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/member"
)

// TestEveryFileHasOneOwner: the packages put their files into one directory and
// know nothing of each other.
func TestEveryFileHasOneOwner(t *testing.T) {
	owner := map[string]string{}
	for _, f := range []struct{ name, of string }{
		{identity.KeyFile, "the key"}, {identity.APIFile, "the certificate for clients"}, {identity.TrustFile, "trust"}, {member.StateFile, "membership"},
		{discover.MemoryFile, "discovery"}, {linkMemory, "link addresses"}, {transfersMemory, "transfers"},
		{modelsMemory, "models"}, {"agent.log", "the log"}, {"lock", "the lock"},
	} {
		if other := owner[f.name]; other != "" {
			t.Errorf("%s is the file of %s and of %s", f.name, other, f.of)
		}
		owner[f.name] = f.of
	}
}
