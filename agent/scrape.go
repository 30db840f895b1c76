package agent

import (
	"context"
	"errors"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tbcluster/agent/metrics"
	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/doctor"
	"tbcluster/gateway"
)

// newMetrics makes the collector of what is said to Prometheus.
func (a *Agent) newMetrics() *metrics.Collector {
	var codes []string
	for _, e := range doctor.Catalogue() {
		codes = append(codes, e.Code)
	}
	return metrics.New(metrics.Options{
		State: func() *v1.ClusterState { s, _ := a.board.get(); return s },
		Codes: codes, Version: a.opt.Version, Started: a.started, Privileged: a.opt.Privileged,
	})
}

// serveMetrics answers Prometheus on the loopback and wherever else the
// configuration says, until ctx ends.
func (a *Agent) serveMetrics(ctx context.Context) error {
	c := a.opt.Config
	registry, err := a.metrics.Registry()
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 8}))
	guard := gateway.Guard{LocalNames: a.localNames, Keys: c.MetricsKeys, Log: a.log.With("part", "metrics")}
	type served struct {
		l net.Listener
		h http.Handler
	}
	var all []served
	if c.MetricsPort != 0 {
		ls, address, err := gateway.ListenLoopback(c.MetricsPort)
		if err != nil {
			return fault.New(fault.PortInUse, "listen for the metrics", err, "choose another metrics_port in "+a.opt.Paths.Config+"; 0 is none")
		}
		a.metricsAddr.Store(&address)
		a.log.Info("metrics are served", "address", "http://"+address+"/metrics")
		a.poke()
		for _, l := range ls {
			all = append(all, served{l, guard.Loopback(mux)})
		}
	}
	outside := guard.Keyed(mux)
	if c.MetricsOpen {
		outside = guard.Keyless(mux)
	}
	for _, addr := range c.MetricsListen {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			for _, s := range all {
				err = errors.Join(err, s.l.Close())
			}
			return fault.New(fault.PortInUse, "listen for the metrics on "+addr, err, "correct metrics_listen in "+a.opt.Paths.Config)
		}
		all = append(all, served{l, outside})
	}
	errs := make(chan error, len(all))
	for _, s := range all {
		go func() { errs <- a.gateway.Serve(ctx, s.l, s.h) }()
	}
	for range all {
		err = errors.Join(err, <-errs)
	}
	return err
}
