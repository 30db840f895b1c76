package fault

import "strings"

// verbs are the words with which a What begins that says what was being done:
// "copy models/x.gguf to beta". People read what failed, so it is shown as
// "cannot copy models/x.gguf to beta". A What that begins with any other word
// is a whole statement already: "no node is called gamma".
var verbs = func() map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(`
		accept act add agree allow announce answer apply ask assign attach begin bind boot bring build call cancel carry change
		check choose clean close collect compare compute connect continue copy count create decode decrypt delete deliver
		describe detect determine download encode encrypt end enter erase establish examine exchange execute expect export
		fetch fill find finish follow forget format forward gather generate get give go grant hand handle hash hear hold identify
		import inspect install introduce join keep kill launch learn leave let list listen load lock look make map mark measure
		merge mount move obtain open pair parse pause pick ping place plan prepare print probe process prove publish pull push
		put query read rebuild receive record recover register release reload remember remove rename renew replace reply
		report request rescan reserve reset resolve restart restore resume retrieve return revert revoke run save scan search
		see send serve set show shut sign signal skip split start stat stop store subscribe switch sync take talk tell
		terminate test trace transfer trust try undo unlock unmount unpack unpair update upgrade upload use verify wait wake
		warm watch write`) {
		m[w] = true
	}
	return m
}()

// statement makes one form of what a What may be: a statement that something
// failed.
func statement(what string) string {
	first, rest, _ := strings.Cut(what, " ")
	switch {
	case !verbs[first] || strings.HasSuffix(what, "?"):
		return what
	case first == "wait" && rest != "":
		return "gave up waiting " + rest
	}
	return "cannot " + what
}
