package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"tbcluster/api/fault"
)

// APIFile is the name of the file, in the agent's state directory, with the
// certificate and key by which clients know this node.
const APIFile = "api.pem"

// ServerName is the one name in every certificate of that kind. It is no address:
// what counts is that the certificate is the one in the client's bundle.
const ServerName = "tbcluster"

const certBlock = "CERTIFICATE"

// OpenAPI returns the certificate in dir by which clients know this node, and
// makes one if there is none. It is P-256: what nodes use among themselves, Ed25519,
// many TLS libraries do not take.
func OpenAPI(dir string) (tls.Certificate, error) {
	path := filepath.Join(dir, APIFile)
	data, err := readSmall(path, maxKeyFile)
	if errors.Is(err, fs.ErrNotExist) {
		cert, key, merr := NewCertificate(ServerName, true)
		if merr != nil {
			return tls.Certificate{}, merr
		}
		err = createFile(path, append(cert, key...))
		if err == nil || errors.Is(err, fs.ErrExist) {
			data, err = readSmall(path, maxKeyFile)
		}
	}
	if err != nil {
		return tls.Certificate{}, apiFault(path, err)
	}
	if i, err := os.Stat(path); err != nil || i.Mode().Perm()&0o077 != 0 {
		return tls.Certificate{}, apiFault(path, errors.Join(err, errors.New("others may read it")))
	}
	cert, err := tls.X509KeyPair(data, data)
	if err != nil {
		return tls.Certificate{}, apiFault(path, err)
	}
	return cert, nil
}

func apiFault(path string, err error) *fault.Fault {
	return fault.New(fault.FileIO, "use the certificate of this node for clients", err,
		"restore the file from a backup; without one, remove it and make the bundles of all clients anew").At(path)
}

// NewCertificate makes a P-256 key and a certificate of its own for it, in PEM: of
// a server by that name, or of a client. Dates are as wide as they go, since
// clocks may be wrong and what ends it is --revoke.
func NewCertificate(name string, server bool) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, fmt.Errorf("make a certificate: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Unix(0, 0),
		NotAfter:              time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}
	if server {
		// Some libraries take nothing for an anchor that does not say it is one.
		template.IsCA, template.MaxPathLenZero = true, true
		template.KeyUsage |= x509.KeyUsageCertSign
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		template.DNSNames = []string{name}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		return nil, nil, fmt.Errorf("make a certificate: %w", err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: certBlock, Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: pkcs8}), nil
}

// Bundle is what a client is given, as one file.
type Bundle struct {
	Name, Role, Cluster string
	Node                NodeID
	NodeName            string
	Addresses           []string // "host:port" of the node
	Server              []byte   // the node's certificate, DER
	Certificate, Key    []byte   // the client's, PEM
}

// Text returns the bundle: lines that say what it is, then, in an order in which
// the one file serves as certificate, as key and as trusted authority, the
// client's certificate, its key, and the certificate of the node.
func (b Bundle) Text() []byte {
	var t bytes.Buffer
	say := func(key, value string) { fmt.Fprintf(&t, "%s: %s\n", key, value) }
	say("tbcluster-client", "1")
	say("name", b.Name)
	say("role", b.Role)
	say("cluster", b.Cluster)
	say("node", b.NodeName)
	say("node-id", string(b.Node))
	for _, a := range b.Addresses {
		say("address", a)
	}
	say("server-name", ServerName)
	t.WriteByte('\n')
	t.Write(b.Certificate)
	t.Write(b.Key)
	t.Write(pem.EncodeToMemory(&pem.Block{Type: certBlock, Bytes: b.Server}))
	return t.Bytes()
}
