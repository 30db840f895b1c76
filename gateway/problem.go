package gateway

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// problem is an error in the shape of OpenAI's: what clients of that API show.
type problem struct {
	status  int
	message string
	kind    string // "type" there
	param   string
	code    string
	// retry is after how many seconds to try again; 0 says nothing.
	retry int
	// elsewhere says to the gateway of another node that the request was not
	// given to the engine, so that it may be tried elsewhere.
	elsewhere bool
}

func (p *problem) Error() string { return p.message }

// Types of errors, as OpenAI names them.
const (
	badRequest  = "invalid_request_error"
	notAllowed  = "permission_error"
	badKey      = "authentication_error"
	unavailable = "service_unavailable_error"
	upstream    = "upstream_error"
)

// refusedHeader is set on answers that come from a gateway, not from an engine.
const refusedHeader = "Tbcluster-Refused"

func (p *problem) body() []byte {
	type inner struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	opt := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	b, err := json.Marshal(map[string]inner{"error": {p.message, p.kind, opt(p.param), opt(p.code)}})
	if err != nil {
		// Strings always marshal.
		panic(err)
	}
	return append(b, '\n')
}

func (p *problem) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	if p.retry > 0 {
		h.Set("Retry-After", strconv.Itoa(p.retry))
	}
	if p.elsewhere {
		h.Set(refusedHeader, p.code)
	}
	if p.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(p.status)
	// The client may have gone; nobody is left to tell.
	_, _ = w.Write(p.body())
}
