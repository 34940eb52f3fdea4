// SPDX-License-Identifier: Apache-2.0
// What fusedops/direct.py does for every call, in C: `Caller` is `Plan.python_caller`, `ready_norm`
// that of integrations/norms.py, and `call_module` is `call_unhooked` of integrations/stream.py for a
// call that nothing was handed over to. All return None where the Python would, and whoever called
// goes on as it would there. Compiled and cached by Triton's own builder, which needs the same
// compiler; without one the Python runs.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

// What a call asks torch for, given by configure().
#define GLOBALS(X)                                                                             \
    X(is_grad_enabled) X(function_modes) X(current_device) X(current_stream) X(empty)          \
    X(counters) X(forward_ad) X(data_ptr) X(is_contiguous) X(numel) X(slot) X(any_global_hook)
#define DECLARE(name) static PyObject *name;
GLOBALS(DECLARE)

// Interned strings.
#define STRINGS(X)                                                                             \
    X(shape) X(calls) X(launch_enter_hook) X(launch_exit_hook) X(_current_level) X(held)       \
    X(__dict__) X(_fusedops_ready) X(_forward_pre_hooks) X(_forward_hooks) X(_backward_hooks)  \
    X(_backward_pre_hooks) X(forward) X(_compiled_call_impl) X(_parameters) X(call)           \
    X(add_call) X(eps) X(eps_name) X(weight) X(bias)
#define DECLARE_STRING(name) static PyObject *s_##name;
STRINGS(DECLARE_STRING)

enum { INPUTS = 4, OUTPUTS = 4, GRID_AND_STREAM = 4, MISALIGNED = 15 };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *check, *grad, *train, *hooks, *launch, *head, *tail, *y_dtype, *sum_dtype, *eps,
        *spec, *plan;
    Py_ssize_t n_cols, block_rows, device;
    int adds, has_weight, has_bias;
} Caller;

static PyObject *call0(PyObject *function) { return PyObject_Vectorcall(function, NULL, 0, NULL); }

static PyObject *call1(PyObject *function, PyObject *argument) {
    return PyObject_Vectorcall(function, &argument, 1, NULL);
}

// Answers of functions: 1 yes, 0 no, -1 an exception is set. All steal `value`.

static int truth(PyObject *value) {
    if (value == NULL) return -1;
    int answer = PyObject_IsTrue(value);
    Py_DECREF(value);
    return answer;
}

static int is_object(PyObject *value, PyObject *other) {
    if (value == NULL) return -1;
    Py_DECREF(value);
    return value == other;
}

static int integer(PyObject *value, long long *result) {
    if (value == NULL) return -1;
    *result = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *result == -1 && PyErr_Occurred() ? -1 : 1;
}

static int has_hooks(PyObject *runtime, PyObject *name) {
    PyObject *chain = PyObject_GetAttr(runtime, name);
    if (chain == NULL) return -1;
    PyObject *calls = PyObject_GetAttr(chain, s_calls);
    Py_DECREF(chain);
    if (calls == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 1;  // somebody put a function in the chain's place
    }
    return truth(calls);
}

// Whether plain eager execution goes on, in which a kernel may be launched on pointers.
static int may_launch(Caller *self, PyObject *const *inputs) {
    PyObject *given[INPUTS];
    size_t n = 0;
    given[n++] = inputs[0];
    if (self->adds) given[n++] = inputs[1];
    if (self->has_weight) given[n++] = inputs[2];
    if (self->has_bias) given[n++] = inputs[3];
    int answer = is_object(PyObject_Vectorcall(self->check, given, n, NULL), Py_True);
    if (answer != 1) return answer;
    answer = is_object(call0(is_grad_enabled), self->grad);
    if (answer != 1) return answer;
    PyObject *level = PyDict_GetItemWithError(forward_ad, s__current_level);
    if (level == NULL) return PyErr_Occurred() ? -1 : 0;
    if (PyLong_AsLong(level) >= 0 || PyList_GET_SIZE(counters) > 0) return 0;
    answer = truth(call0(function_modes));
    if (answer != 0) return answer < 0 ? -1 : 0;
    answer = has_hooks(self->hooks, s_launch_enter_hook);
    if (answer != 0) return answer < 0 ? -1 : 0;
    answer = has_hooks(self->hooks, s_launch_exit_hook);
    if (answer != 0) return answer < 0 ? -1 : 0;
    long long device;
    if (integer(call0(current_device), &device) < 0) return -1;
    if (device != self->device) return 0;
    answer = is_object(call1(is_contiguous, inputs[0]), Py_True);
    if (answer != 1 || !self->adds) return answer;
    answer = is_object(call1(is_contiguous, inputs[1]), Py_True);
    if (answer != 1) return answer;
    PyObject *shape = PyObject_GetAttr(inputs[0], s_shape);
    PyObject *other = PyObject_GetAttr(inputs[1], s_shape);
    answer = shape && other ? PyObject_RichCompareBool(shape, other, Py_EQ) : -1;
    Py_XDECREF(shape);
    Py_XDECREF(other);
    return answer;
}

// The strides of a new tensor of this shape; a contiguous x may have others where a size is 1.
static PyObject *contiguous_strides(PyObject *shape) {
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    PyObject *strides = PyTuple_New(n);
    long long step = 1;
    for (Py_ssize_t i = n - 1; strides != NULL && i >= 0; i--) {
        PyTuple_SET_ITEM(strides, i, PyLong_FromLongLong(step));
        step *= PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (PyErr_Occurred()) Py_CLEAR(strides);
    }
    return strides;
}

// A new contiguous tensor, and its pointer.
static int allocate(PyObject *shape, PyObject *strides, PyObject *dtype, PyObject **tensor,
                    PyObject **pointer) {
    PyObject *arguments[] = {shape, strides, dtype};
    *tensor = PyObject_Vectorcall(empty, arguments, 3, NULL);
    *pointer = *tensor == NULL ? NULL : call1(data_ptr, *tensor);
    return *pointer == NULL ? -1 : 1;
}

static PyObject *call_training(Caller *self, PyObject *const *inputs, PyObject *const *pointers,
                               long long n_rows) {
    PyObject *prepared = Py_BuildValue("(OL(OOOO))", self->plan, n_rows, pointers[0], pointers[1],
                                       pointers[2], pointers[3]);
    if (prepared == NULL) return NULL;
    PyObject *arguments[] = {inputs[0], inputs[1], inputs[2], inputs[3],
                             self->eps, self->spec, prepared};
    PyObject *outputs = PyObject_Vectorcall(self->train, arguments, 7, NULL);
    Py_DECREF(prepared);
    if (outputs == NULL || self->adds) return outputs;
    return Py_BuildValue("(NO)", outputs, Py_None);
}

static PyObject *call_inference(Caller *self, PyObject *x, PyObject *const *pointers,
                                long long n_rows) {
    PyObject *y = NULL, *summed = NULL, *y_ptr = NULL, *sum_ptr = NULL, *stream = NULL;
    PyObject *shape = NULL, *result = NULL, *arguments = NULL;
    PyObject *size = PyObject_GetAttr(x, s_shape), *strides = NULL;
    if (size == NULL) goto done;
    shape = PyTuple_GetSlice(size, 0, PyTuple_GET_SIZE(size));  // a tuple, no subclass of it
    strides = shape == NULL ? NULL : contiguous_strides(shape);
    if (strides == NULL || allocate(shape, strides, self->y_dtype, &y, &y_ptr) < 0) goto done;
    if (self->adds && allocate(shape, strides, self->sum_dtype, &summed, &sum_ptr) < 0) goto done;
    PyObject *device = PyLong_FromSsize_t(self->device);
    stream = device == NULL ? NULL : call1(current_stream, device);
    Py_XDECREF(device);
    if (stream == NULL) goto done;

    Py_ssize_t n_head = PyTuple_GET_SIZE(self->head), n_tail = PyTuple_GET_SIZE(self->tail);
    Py_ssize_t at = 0;
    arguments = PyTuple_New(GRID_AND_STREAM + n_head + INPUTS + OUTPUTS + 1 + n_tail);
    if (arguments == NULL) goto done;
#define PUT(object) PyTuple_SET_ITEM(arguments, at++, object)
    PUT(PyLong_FromLongLong((n_rows + self->block_rows - 1) / self->block_rows));
    PUT(PyLong_FromLong(1));
    PUT(PyLong_FromLong(1));
    PUT(Py_NewRef(stream));
    for (Py_ssize_t i = 0; i < n_head; i++) PUT(Py_NewRef(PyTuple_GET_ITEM(self->head, i)));
    for (Py_ssize_t i = 0; i < INPUTS; i++) PUT(Py_NewRef(pointers[i]));
    PUT(Py_NewRef(y_ptr));
    PUT(Py_NewRef(self->adds ? sum_ptr : Py_None));
    PUT(Py_NewRef(Py_None));  // no statistics
    PUT(Py_NewRef(Py_None));
    PUT(PyLong_FromLongLong(n_rows));
    for (Py_ssize_t i = 0; i < n_tail; i++) PUT(Py_NewRef(PyTuple_GET_ITEM(self->tail, i)));
#undef PUT
    PyObject *launched = PyErr_Occurred() ? NULL : PyObject_Call(self->launch, arguments, NULL);
    if (launched == NULL) goto done;
    Py_DECREF(launched);
    result = PyTuple_Pack(2, y, self->adds ? summed : Py_None);
done:
    Py_XDECREF(size);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    Py_XDECREF(y);
    Py_XDECREF(summed);
    Py_XDECREF(y_ptr);
    Py_XDECREF(sum_ptr);
    Py_XDECREF(stream);
    Py_XDECREF(arguments);
    return result;
}

// (x, residual, weight, bias) -> (y, summed), or None.
static PyObject *caller_vectorcall(PyObject *object, PyObject *const *inputs, size_t nargsf,
                                   PyObject *names) {
    Caller *self = (Caller *)object;
    if (PyVectorcall_NARGS(nargsf) != INPUTS || (names && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "expected x, residual, weight and bias");
        return NULL;
    }
    int answer = may_launch(self, inputs);
    if (answer < 0) return NULL;
    if (answer == 0) Py_RETURN_NONE;

    int wanted[INPUTS] = {1, self->adds, self->has_weight, self->has_bias};
    PyObject *pointers[INPUTS] = {NULL, NULL, NULL, NULL}, *result = NULL;
    unsigned long long bits = 0;
    long long n_rows;
    for (int i = 0; i < INPUTS; i++) {
        pointers[i] = wanted[i] ? call1(data_ptr, inputs[i]) : Py_NewRef(Py_None);
        if (pointers[i] == NULL) goto done;
        if (wanted[i]) bits |= PyLong_AsUnsignedLongLongMask(pointers[i]);
    }
    if (integer(call1(numel, inputs[0]), &n_rows) < 0) goto done;
    n_rows /= self->n_cols;
    if (bits & MISALIGNED || n_rows <= 0 || n_rows > INT_MAX)
        result = Py_NewRef(Py_None);
    else if (self->train != Py_None)
        result = call_training(self, inputs, pointers, n_rows);
    else
        result = call_inference(self, inputs[0], pointers, n_rows);
done:
    for (int i = 0; i < INPUTS; i++) Py_XDECREF(pointers[i]);
    return result;
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"check",  "grad",     "train",      "hooks",  "launch", "head",
                            "tail",   "y_dtype",  "sum_dtype",  "eps",    "spec",   "plan",
                            "n_cols", "block_rows", "device", "has_weight", "has_bias", NULL};
    if (!PyList_Check(counters) || !PyDict_Check(forward_ad)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of counters and forward_ad's dict");
        return NULL;
    }
    Caller *self = (Caller *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOO!O!OOOOOnnnpp", names, &self->check,
                                     &self->grad, &self->train, &self->hooks, &self->launch,
                                     &PyTuple_Type, &self->head, &PyTuple_Type, &self->tail,
                                     &self->y_dtype, &self->sum_dtype, &self->eps, &self->spec,
                                     &self->plan, &self->n_cols, &self->block_rows, &self->device,
                                     &self->has_weight, &self->has_bias)) {
        self->check = NULL;  // nothing is owned yet
        Py_DECREF(self);
        return NULL;
    }
    self->vectorcall = caller_vectorcall;
    self->adds = self->sum_dtype != Py_None;
    PyObject *owned[] = {self->check, self->grad,    self->train,     self->hooks,
                         self->launch, self->head,   self->tail,      self->y_dtype,
                         self->sum_dtype, self->eps, self->spec,      self->plan};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_INCREF(owned[i]);
    return (PyObject *)self;
}

static void caller_dealloc(PyObject *object) {
    Caller *self = (Caller *)object;
    if (self->check != NULL) {
        PyObject *owned[] = {self->check, self->grad,    self->train,     self->hooks,
                             self->launch, self->head,   self->tail,      self->y_dtype,
                             self->sum_dtype, self->eps, self->spec,      self->plan};
        for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_DECREF(owned[i]);
    }
    Py_TYPE(object)->tp_free(object);
}

static PyTypeObject CallerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fusedops_direct.Caller",
    .tp_basicsize = sizeof(Caller),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Caller, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = caller_new,
    .tp_dealloc = caller_dealloc,
};

// Whether calling the module with this __dict__ is more than running its class's forward, be it for
// a global hook.
static int is_hooked(PyObject *state) {
    PyObject *const hooks[] = {s__forward_pre_hooks, s__forward_hooks, s__backward_hooks,
                               s__backward_pre_hooks};
    for (int i = 0; i < 4; i++) {
        PyObject *registered = PyDict_GetItemWithError(state, hooks[i]);
        if (registered == NULL) return PyErr_Occurred() ? -1 : 1;
        int answer = PyObject_IsTrue(registered);
        if (answer != 0) return answer;
    }
    int answer = PyDict_Contains(state, s_forward);
    if (answer != 0) return answer;
    PyObject *compiled = PyDict_GetItemWithError(state, s__compiled_call_impl);
    if (compiled == NULL && PyErr_Occurred()) return -1;
    if (compiled != NULL && compiled != Py_None) return 1;
    return truth(call0(any_global_hook));
}

// A parameter by the name that an attribute of `ready` holds, None where the name is None.
// A borrowed reference; NULL without an exception where there is no such parameter.
static PyObject *parameter(PyObject *parameters, PyObject *ready, PyObject *attribute) {
    PyObject *name = PyObject_GetAttr(ready, attribute);
    if (name == NULL) return NULL;
    PyObject *found = name == Py_None ? Py_None : PyDict_GetItemWithError(parameters, name);
    Py_DECREF(name);
    return found;
}

// (y, summed) of a module with this __dict__, where a call like it was in order before; or None.
static PyObject *call_ready(PyObject *state, PyObject *x, PyObject *residual) {
    PyObject *ready = PyDict_GetItemWithError(state, s__fusedops_ready);
    if (ready == NULL || ready == Py_None) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    Py_INCREF(ready);
    PyObject *result = NULL, *weight = NULL, *bias = NULL;
    PyObject *call = PyObject_GetAttr(ready, residual == Py_None ? s_call : s_add_call);
    PyObject *eps = PyObject_GetAttr(ready, s_eps);
    PyObject *eps_name = PyObject_GetAttr(ready, s_eps_name);
    PyObject *parameters = PyDict_GetItemWithError(state, s__parameters);
    if (call == NULL || eps == NULL || eps_name == NULL) goto done;
    if (call == Py_None || parameters == NULL || !PyDict_Check(parameters)) goto done;
    if (PyDict_GetItemWithError(state, eps_name) != eps) goto done;
    weight = parameter(parameters, ready, s_weight);
    bias = weight == NULL ? NULL : parameter(parameters, ready, s_bias);
    if (bias == NULL) goto done;
    PyObject *arguments[] = {x, residual, Py_NewRef(weight), Py_NewRef(bias)};
    result = PyObject_Vectorcall(call, arguments, INPUTS, NULL);
    Py_DECREF(weight);
    Py_DECREF(bias);
done:
    if (result == NULL && !PyErr_Occurred()) result = Py_NewRef(Py_None);
    Py_DECREF(ready);
    Py_XDECREF(call);
    Py_XDECREF(eps);
    Py_XDECREF(eps_name);
    return result;
}

static PyObject *state_of(PyObject *module) {
    PyObject *state = PyObject_GetAttr(module, s___dict__);
    if (state != NULL && !PyDict_Check(state)) {
        PyErr_SetString(PyExc_TypeError, "expected a module");
        Py_CLEAR(state);
    }
    return state;
}

// (norm, x, residual) -> (y, summed), or None.
static PyObject *ready_norm(PyObject *unused, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "expected a module, a tensor, and a tensor or None");
        return NULL;
    }
    PyObject *state = state_of(args[0]);
    if (state == NULL) return NULL;
    PyObject *result = call_ready(state, args[1], args[2]);
    Py_DECREF(state);
    return result;
}

// (module) -> whether calling it is more than running its class's forward, or a global hook exists.
static PyObject *module_is_hooked(PyObject *unused, PyObject *module) {
    if (any_global_hook == NULL) Py_RETURN_TRUE;
    PyObject *state = state_of(module);
    if (state == NULL) return NULL;
    int answer = is_hooked(state);
    Py_DECREF(state);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

// (norm, x) -> y, or None.
static PyObject *call_module(PyObject *unused, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a module and a tensor");
        return NULL;
    }
    if (slot == NULL || any_global_hook == NULL) Py_RETURN_NONE;
    PyObject *state = state_of(args[0]);
    if (state == NULL) return NULL;
    PyObject *result = NULL;
    int answer = is_hooked(state);
    if (answer == 0) answer = is_object(PyObject_GetAttr(slot, s_held), Py_None) - 1;
    if (answer == 0) result = call_ready(state, args[1], Py_None);
    Py_DECREF(state);
    if (result == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (PyTuple_Check(result)) Py_SETREF(result, Py_NewRef(PyTuple_GET_ITEM(result, 0)));
    return result;
}

// Takes the objects of GLOBALS by name; some may come later than others.
static PyObject *configure(PyObject *unused, PyObject *args, PyObject *kwargs) {
#define NAME(name) #name,
#define ADDRESS(name) &name,
    static const char *const names[] = {GLOBALS(NAME)};
    PyObject **const addresses[] = {GLOBALS(ADDRESS)};
    for (size_t i = 0; kwargs != NULL && i < sizeof names / sizeof *names; i++) {
        PyObject *value = PyDict_GetItemString(kwargs, names[i]);
        if (value != NULL) Py_XSETREF(*addresses[i], Py_NewRef(value));
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS, NULL},
    {"is_hooked", module_is_hooked, METH_O, NULL},
    {"ready_norm", (PyCFunction)(void (*)(void))ready_norm, METH_FASTCALL, NULL},
    {"call_module", (PyCFunction)(void (*)(void))call_module, METH_FASTCALL, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "fusedops_direct", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_fusedops_direct(void) {
#define INTERN(name)                                                                           \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL) return NULL;
    STRINGS(INTERN)
    if (PyType_Ready(&CallerType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "Caller", (PyObject *)&CallerType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
