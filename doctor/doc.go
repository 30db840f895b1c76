// Package doctor says what is wrong, what it means and what to do.
//
// Catalogue has one row for every finding; docs/findings.md is made from it.
// Check runs every check over Facts, which is plain data gathered by the agent:
// checks read no files and ask nobody, so that each is tested by the data that
// provokes it. Package doctor mends nothing.
package doctor
