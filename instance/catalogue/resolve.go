package catalogue

import (
	"fmt"
	"slices"
	"strings"

	"tbcluster/api/fault"
)

// Resolve returns the model that a person means by a name: its ID, its name, a
// GGUF's stem without its quantisation, org/name of a Hugging Face repository,
// each with ":QUANT" where several fit. Case does not matter. Faults:
// ModelUnknown with the command that downloads it, ModelAmbiguous with a list of
// what fits.
func Resolve(name string, models []Model) (Model, error) {
	if name == "" {
		return Model{}, fault.Newf(fault.Usage, "`tbcluster models` lists the models", "no model is named")
	}
	for _, m := range models {
		if m.ID == name {
			return m, nil
		}
	}
	var exact, fit []Model
	for _, m := range models {
		switch {
		case strings.EqualFold(m.Name, name):
			exact = append(exact, m)
		case m.fits(name):
			fit = append(fit, m)
		}
	}
	if len(exact) > 0 {
		fit = exact
	}
	switch len(fit) {
	case 1:
		return fit[0], nil
	case 0:
		return Model{}, unknown(name, models)
	}
	var list []string
	for _, m := range fit {
		list = append(list, fmt.Sprintf("%s (%s)", m.Name, m.short()))
	}
	slices.Sort(list)
	return Model{}, fault.Newf(fault.ModelAmbiguous, "name one of: "+strings.Join(list, ", "), "several models fit %q", name).With("model", name)
}

func (m Model) short() string {
	if len(m.ID) > 19 {
		return m.ID[:19]
	}
	return m.ID
}

// base is the name without the quantisation at its end.
func (m Model) base() string {
	if m.Quant == "" {
		return m.Name
	}
	for _, sep := range []string{".", "-", "_"} {
		if n := len(m.Name) - len(sep) - len(m.Quant); n > 0 && strings.EqualFold(m.Name[n:], sep+m.Quant) {
			return m.Name[:n]
		}
	}
	return m.Name
}

// Names returns the names that people may write for a model besides its own,
// without a quantisation.
func Names(m Model) []string {
	names := []string{m.base()}
	if _, last, ok := strings.Cut(m.Name, "/"); ok {
		names = append(names, last)
	}
	for _, c := range m.Copies {
		if r := repoOf(c.Path); r != "" {
			names = append(names, r)
		}
	}
	return names
}

func (m Model) fits(name string) bool {
	if strings.HasPrefix(m.ID, name) && len(name) >= 8 {
		return true
	}
	for _, n := range Names(m) {
		if strings.EqualFold(n, name) || m.Quant != "" && strings.EqualFold(n+":"+m.Quant, name) {
			return true
		}
	}
	return m.Quant != "" && strings.EqualFold(m.Name+":"+m.Quant, name)
}

func unknown(name string, models []Model) error {
	repo, quant, _ := strings.Cut(name, ":")
	fix := "`tbcluster models` lists the models"
	if org, rest, ok := strings.Cut(repo, "/"); ok && org != "" && rest != "" {
		fix = "download it on one node: hf download " + repo
		if quant != "" {
			fix += " --include '*" + quant + "*'"
		}
		fix += " (tbcluster cp then brings it to the others)"
	} else if near := nearest(name, models); near != "" {
		fix = "did you mean " + near + "? " + fix
	} else {
		fix += "; download one on one node, say: hf download ORG/" + repo
	}
	return fault.Newf(fault.ModelUnknown, fix, "no node has a model called %q", name).With("model", name)
}

// nearest is the model whose name holds the most of what was written.
func nearest(name string, models []Model) string {
	for _, m := range models {
		if strings.Contains(strings.ToLower(m.Name), strings.ToLower(name)) {
			return m.Name
		}
	}
	return ""
}
