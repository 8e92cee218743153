// SPDX-License-Identifier: Apache-2.0

// Package admission tests the manifests in runtimeclass/ without a cluster: in the API server's own admission plugin.
package admission

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
)

const manifests = "../../runtimeclass"

// load decodes all objects in a file, and fails on whatever an API server would refuse or ignore.
func load(t *testing.T, file string) (objects []runtime.Object) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, file))
	if err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yamlutil.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
	defer documents.Close()
	buf := make([]byte, 1<<16)
	for {
		n, err := documents.Read(buf)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := decoder.Decode(buf[:n], nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		objects = append(objects, object)
	}
}

// rbac decides as RBAC does about what the manifests have of it: ClusterRoles with resource names, bound in a namespace.
type rbac struct {
	roles    []*rbacv1.ClusterRole
	bindings []*rbacv1.RoleBinding
}

func (r rbac) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	for _, b := range r.bindings {
		bound := slices.ContainsFunc(b.Subjects, func(s rbacv1.Subject) bool {
			return s.Kind == rbacv1.GroupKind && slices.Contains(a.GetUser().GetGroups(), s.Name)
		})
		if !bound || b.Namespace != a.GetNamespace() || b.RoleRef.Kind != "ClusterRole" {
			continue
		}
		for _, role := range r.roles {
			for _, rule := range role.Rules {
				if role.Name == b.RoleRef.Name && slices.Contains(rule.Verbs, a.GetVerb()) && slices.Contains(rule.APIGroups, a.GetAPIGroup()) &&
					slices.Contains(rule.Resources, a.GetResource()) && slices.Contains(rule.ResourceNames, a.GetName()) {
					return authorizer.DecisionAllow, "", nil
				}
			}
		}
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func TestRuntimeClass(t *testing.T) {
	objects := load(t, "runtimeclass.yaml")
	if len(objects) != 1 {
		t.Fatalf("%d objects", len(objects))
	}
	if class, ok := objects[0].(*nodev1.RuntimeClass); !ok || class.Name != "thaw" || class.Handler != "thaw" {
		t.Errorf("%+v", objects[0])
	}
}

func TestWhoMayUseTheRuntimeClass(t *testing.T) {
	var auth rbac
	cluster := []runtime.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-b"}},
	}
	for _, o := range append(load(t, "admission.yaml"), load(t, "grant.yaml")...) {
		switch o := o.(type) {
		case *rbacv1.ClusterRole:
			auth.roles = append(auth.roles, o)
		case *rbacv1.RoleBinding:
			auth.bindings = append(auth.bindings, o)
		case *admissionv1.ValidatingAdmissionPolicy:
			fillIn(o.Spec.MatchConstraints)
			cluster = append(cluster, o)
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			cluster = append(cluster, o)
		default:
			t.Fatalf("unexpected %T", o)
		}
	}
	validate := plugin(t, auth, cluster...)

	class := func(name string) *string { return &name }
	for _, c := range []struct {
		name, namespace, account string
		class                    *string
		refused                  bool
	}{
		{name: "granted", namespace: "team-a", account: "default", class: class("thaw")},
		{name: "granted, another account", namespace: "team-a", account: "agents", class: class("thaw")},
		{name: "granted, account not filled in", namespace: "team-a", class: class("thaw")},
		{name: "not granted", namespace: "team-b", account: "default", class: class("thaw"), refused: true},
		{name: "another class", namespace: "team-b", account: "default", class: class("gvisor")},
		{name: "no class", namespace: "team-b", account: "default"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: c.namespace},
				Spec:       corev1.PodSpec{RuntimeClassName: c.class, ServiceAccountName: c.account},
			}
			// Who asks is the controller: it must not matter what that one may do.
			err := validate(pod, &user.DefaultInfo{Name: "system:serviceaccount:kube-system:replicaset-controller", Groups: []string{"system:serviceaccounts:team-a"}})
			if !c.refused {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil {
				t.Fatal("admitted")
			}
			for _, want := range []string{"forbidden", "service account team-b/default may not use the RuntimeClass thaw", "thaw-user"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

// fillIn sets what the API server fills in when it stores a policy.
func fillIn(m *admissionv1.MatchResources) {
	equivalent, all := admissionv1.Equivalent, admissionv1.AllScopes
	m.NamespaceSelector, m.ObjectSelector, m.MatchPolicy = &metav1.LabelSelector{}, &metav1.LabelSelector{}, &equivalent
	for i := range m.ResourceRules {
		m.ResourceRules[i].Scope = &all
	}
}

// plugin is the API server's ValidatingAdmissionPolicy plugin in a cluster that has certain objects.
func plugin(t *testing.T, auth authorizer.UnconditionalAuthorizer, cluster ...runtime.Object) func(*corev1.Pod, user.Info) error {
	t.Helper()
	p, err := validating.NewPlugin(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(cluster...)
	factory := informers.NewSharedInformerFactory(client, 0)
	stop := make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		factory.Shutdown()
	})
	p.SetUnconditionalAuthorizer(auth)
	p.SetExternalKubeClientSet(client)
	p.SetExternalKubeInformerFactory(factory)
	p.SetDynamicClient(dynamicfake.NewSimpleDynamicClient(scheme.Scheme))
	p.SetRESTMapper(testrestmapper.TestOnlyStaticRESTMapper(scheme.Scheme))
	p.SetDrainedNotification(stop)
	if err := p.ValidateInitialization(); err != nil {
		t.Fatal(err)
	}
	factory.Start(stop)
	if !p.WaitForReady() {
		t.Fatal("the plugin did not become ready")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return func(pod *corev1.Pod, who user.Info) error {
		kind, resource := corev1.SchemeGroupVersion.WithKind("Pod"), corev1.SchemeGroupVersion.WithResource("pods")
		a := admission.NewAttributesRecord(pod, nil, kind, pod.Namespace, pod.Name, resource, "", admission.Create, &metav1.CreateOptions{}, false, who)
		return p.Validate(ctx, a, admission.NewObjectInterfacesFromScheme(scheme.Scheme))
	}
}
