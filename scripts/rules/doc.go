// Package rules holds no program: its tests enforce what docs/dev/architecture.md
// says about this repository. Which package may import which, that each says
// what it is for, what none may be called, and under which licences the code is
// that we build on.
package rules
