package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	gateway "sigs.k8s.io/gateway-api/apis/v1"
	strict "sigs.k8s.io/yaml"
)

// kinds reads rendered objects as the operators do that define their kinds, and refuses a field that such a kind does not have. An object
// of another kind is passed over.
func kinds(rendered io.Reader) error {
	types := map[string]func() any{
		"ServiceMonitor": func() any { return new(monitoring.ServiceMonitor) },
		"PrometheusRule": func() any { return new(monitoring.PrometheusRule) },
		"HTTPRoute":      func() any { return new(gateway.HTTPRoute) },
	}
	seen := map[string]bool{}
	text, err := io.ReadAll(rendered)
	if err != nil {
		return err
	}
	documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
	for {
		document := make([]byte, len(text))
		length, err := documents.Read(document)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		var object struct{ Kind string }
		if err := strict.Unmarshal(document[:length], &object); err != nil {
			return err
		}
		made, known := types[object.Kind]
		if !known {
			continue
		}
		if err := strict.UnmarshalStrict(document[:length], made()); err != nil {
			return fmt.Errorf("%s: %w", object.Kind, err)
		}
		seen[object.Kind] = true
	}
	for kind := range types {
		if !seen[kind] {
			return fmt.Errorf("the chart makes no %s", kind)
		}
	}
	fmt.Printf("%d kinds of operators\n", len(seen))
	return nil
}
