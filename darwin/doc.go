// Package darwin implements host.Host on macOS by running the system's own
// programs and reading what they print. The programs are run by a Runner, so
// that everything here runs on any system over recorded outputs.
//
// Nothing here has been tried on a Mac by its authors: the shapes of outputs
// are those in testdata, whose README says where each comes from.
package darwin
