// Checks that alerts and dashboards ask for metrics and labels that exist. metrics.txt says which do, and a test of real nodes says
// whether it tells the truth.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v4"
)

// What Prometheus adds to each series, in Kubernetes and in the compose file.
var added = []string{"namespace", "service", "pod", "job", "instance"}

// Labels by the names of series.
type catalogue map[string][]string

func readCatalogue(file string) catalogue {
	text, err := os.ReadFile(file)
	if err != nil {
		fail(err)
	}
	known := catalogue{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] == "#" {
			continue
		}
		own := slices.Clone(added)
		if len(fields) > 2 {
			own = append(own, strings.Split(fields[2], ",")...)
		}
		name := fields[0]
		if fields[1] == "histogram" {
			known[name+"_bucket"] = append(slices.Clone(own), "le")
			known[name+"_sum"], known[name+"_count"] = own, own
		} else {
			known[name] = own
		}
	}
	return known
}

var parsing = parser.NewParser(parser.Options{})

// labelsOf checks one expression, and gives all labels that its series have.
func (known catalogue) labelsOf(query string) ([]string, error) {
	expression, err := parsing.ParseExpr(query)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", query, err)
	}
	var all []string
	var wrong error
	finds := func(has []string, wanted ...string) {
		for _, label := range wanted {
			if wrong == nil && !slices.Contains(has, label) {
				wrong = fmt.Errorf("%s: no series has the label %s", query, label)
			}
		}
	}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		switch node := node.(type) {
		case *parser.VectorSelector:
			has, is := known[node.Name]
			if !is {
				wrong = fmt.Errorf("%s: there is no %s", query, node.Name)
				return wrong
			}
			all = append(all, has...)
			for _, matcher := range node.LabelMatchers {
				if matcher.Name != labels.MetricName {
					finds(has, matcher.Name)
				}
			}
		case *parser.AggregateExpr:
			finds(known.below(node.Expr), node.Grouping...)
		case *parser.BinaryExpr:
			if node.VectorMatching != nil {
				finds(known.below(node.LHS), node.VectorMatching.MatchingLabels...)
				finds(known.below(node.RHS), node.VectorMatching.MatchingLabels...)
			}
		}
		return wrong
	})
	return all, wrong
}

// below gives the labels of all series that an expression is made of.
func (known catalogue) below(expression parser.Expr) []string {
	var all []string
	for _, selectors := range parser.ExtractSelectors(expression) {
		for _, matcher := range selectors {
			if matcher.Name == labels.MetricName {
				all = append(all, known[matcher.Value]...)
			}
		}
	}
	return all
}

var labelInText = regexp.MustCompile(`\{\{\s*\$labels\.(\w+)`)
var labelInLegend = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)

func (known catalogue) named(text string, in *regexp.Regexp, has []string) error {
	for _, match := range in.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(has, match[1]) {
			return fmt.Errorf("%q: no series has the label %s", text, match[1])
		}
	}
	return nil
}

func (known catalogue) alerts(file string) int {
	text, err := os.ReadFile(file)
	if err != nil {
		fail(err)
	}
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Expr        string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &rules); err != nil {
		fail(fmt.Errorf("%s: %w", file, err))
	}
	count := 0
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			has, err := known.labelsOf(rule.Expr)
			for _, annotation := range rule.Annotations {
				if err == nil {
					err = known.named(annotation, labelInText, has)
				}
			}
			if err != nil {
				fail(fmt.Errorf("%s: %s: %w", file, rule.Alert, err))
			}
			count++
		}
	}
	return count
}

var labelValues = regexp.MustCompile(`^label_values\((.*), *(\w+)\)$`)

func (known catalogue) dashboard(file string) int {
	text, err := os.ReadFile(file)
	if err != nil {
		fail(err)
	}
	var board struct {
		Templating struct {
			List []struct {
				Name, Type string
				Query      json.RawMessage
			}
		}
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		fail(fmt.Errorf("%s: %w", file, err))
	}
	for _, variable := range board.Templating.List {
		if variable.Type != "query" {
			continue
		}
		var query struct{ Query string }
		if err := json.Unmarshal(variable.Query, &query); err != nil {
			fail(fmt.Errorf("%s: %s: %w", file, variable.Name, err))
		}
		parts := labelValues.FindStringSubmatch(query.Query)
		if parts == nil {
			fail(fmt.Errorf("%s: %s: %s is no label_values", file, variable.Name, query.Query))
		}
		has, err := known.labelsOf(parts[1])
		if err == nil && !slices.Contains(has, parts[2]) {
			err = fmt.Errorf("no series has the label %s", parts[2])
		}
		if err != nil {
			fail(fmt.Errorf("%s: %s: %w", file, variable.Name, err))
		}
	}
	count := 0
	for _, panel := range board.Panels {
		for _, target := range panel.Targets {
			has, err := known.labelsOf(strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
			if err == nil {
				err = known.named(target.LegendFormat, labelInLegend, has)
			}
			if err != nil {
				fail(fmt.Errorf("%s: %s: %w", file, panel.Title, err))
			}
			count++
		}
	}
	return count
}

func queries(deploy string) {
	known := readCatalogue(filepath.Join(deploy, "check", "metrics.txt"))
	files := filepath.Join(deploy, "..", "helm", "fanfare", "files")
	alerts := known.alerts(filepath.Join(files, "alerts.yaml"))
	panels := known.dashboard(filepath.Join(files, "dashboard.json"))
	if alerts == 0 || panels == 0 {
		fail(fmt.Errorf("%s: no alerts or no panels", files))
	}
	fmt.Printf("%s: %d alerts and %d queries of panels ask for what exists\n", files, alerts, panels)
}
