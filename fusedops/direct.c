// SPDX-License-Identifier: Apache-2.0
// What is done in every call, in C: `Caller` is `Plan.python_caller` of fusedops/direct.py,
// `launch_backward` its namesake in fusedops/direct_backward.py, what follows it autograd's
// Functions of fusedops/autograd.py, `ready_norm` that of integrations/norms.py, and the rest is the
// residual stream of integrations/stream.py in a known block: `run_block`, the stream's `__add__`,
// and the call of a patched norm on a stream or a tensor (`call_module`). Whatever is out of the
// ordinary returns None before anything is done, and whoever called goes on in Python. Compiled and
// cached by Triton's own builder, which needs the same compiler; without one the Python does it all.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <dlfcn.h>
#ifdef CUDA_HEADER  // the path of cuda.h, where it is known
#include CUDA_HEADER
#endif

// What a call asks torch for, given by configure().
#define GLOBALS(X)                                                                             \
    X(is_grad_enabled) X(autocast_dtype) X(any_function_mode) X(function_modes)                \
    X(current_device) X(current_stream) X(empty) X(counters) X(forward_ad) X(slot)             \
    X(global_hooks) X(stream_type) X(call_type) X(block_type) X(handed_type) X(ready_type)     \
    X(spec_type) X(tensor_type) X(closed) X(floats) X(is_cuda) X(dispatch_modes)               \
    X(transforms) X(jit_trace) X(any_autocast) X(is_inference) X(saves_are_watched)            \
    X(drop_held) X(forget) X(leave_block) X(give_up) X(is_capturing) X(take_back)              \
    X(add_in_python) X(torch_function_in_python) X(method_add) X(function_add)                 \
    X(norm_function) X(norm_forward) X(norm_backward) X(sum_function) X(sum_forward)           \
    X(norm_of_sum) X(norm_of_sum_forward) X(norm_of_sum_backward) X(apply_linked)              \
    X(apply_sum) X(apply_norm_of_sum) X(keep) X(detach)
#define DECLARE(name) static PyObject *name;
GLOBALS(DECLARE)

// Interned strings.
#define STRINGS(X)                                                                             \
    X(calls) X(launch_enter_hook) X(launch_exit_hook) X(_current_level) X(held) X(__dict__)    \
    X(_fusedops_ready) X(_forward_pre_hooks) X(_forward_hooks) X(_backward_hooks)              \
    X(_backward_pre_hooks) X(forward) X(_compiled_call_impl) X(_parameters) X(_fusedops_norm)  \
    X(dtype) X(_version) X(_global_backward_pre_hooks) X(_global_backward_hooks)               \
    X(_global_forward_pre_hooks) X(_global_forward_hooks)                                      \
    X(_global_forward_hooks_always_called) X(_global_forward_hooks_with_kwargs)                \
    X(_fusedops_block) X(training) X(_modules) X(kept) X(to_save) X(materialize_grads)         \
    X(non_differentiable) X(needs_input_grad) X(saved_tensors) X(to) X(itemsize)               \
    X(_backward_cls) X(apply)
#define DECLARE_STRING(name) static PyObject *s_##name;
STRINGS(DECLARE_STRING)

enum { INPUTS = 4, GRID_AND_STREAM = 4, MISALIGNED = 15 };

// What a `Caller` owns, given when it is made.
#define OWNED(X)                                                                               \
    X(check) X(grad) X(train) X(autocast) X(hooks) X(launch) X(head) X(tail) X(y_dtype)        \
    X(sum_dtype) X(statistics) X(eps) X(spec) X(plan)
#define FIELD(name) PyObject *name;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    OWNED(FIELD)
    PyObject *kept;
    Py_ssize_t n_cols, block_rows, device;
    int adds, has_weight, has_bias, centered;
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

// --- tensors ------------------------------------------------------------------------------------
//
// Shapes, strides and pointers are read by the C interface that torch keeps for compiled models. It
// takes the address of the at::Tensor that a Python object holds, which lies at the same place in
// every one. A method called from C takes ten times as long, for it makes and reads objects.

static Py_ssize_t place;  // of the at::Tensor, in bytes from the object's beginning
static int (*torch_data_ptr)(void *, void **), (*torch_dim)(void *, int64_t *);
static int (*torch_sizes)(void *, int64_t **), (*torch_strides)(void *, int64_t **);

// The at::Tensor of an object; NULL with an exception where it is none.
static void *tensor_in(PyObject *object) {
    if (tensor_type != NULL && PyObject_TypeCheck(object, (PyTypeObject *)tensor_type))
        return (char *)object + place;
    PyErr_Format(PyExc_TypeError, "expected a tensor, got %R", Py_TYPE(object));
    return NULL;
}

static int ask_torch(int failed) {
    if (failed) PyErr_SetString(PyExc_RuntimeError, "torch cannot tell what a tensor is like");
    return failed ? -1 : 0;
}

typedef struct {
    int64_t dim, *sizes, *strides;
} Layout;

static int layout_of(PyObject *object, Layout *layout) {
    void *tensor = tensor_in(object);
    if (tensor == NULL) return -1;
    return ask_torch(torch_dim(tensor, &layout->dim) || torch_sizes(tensor, &layout->sizes) ||
                     torch_strides(tensor, &layout->strides));
}

static long long count(const Layout *layout) {
    long long product = 1;
    for (int64_t i = 0; i < layout->dim; i++) product *= layout->sizes[i];
    return product;
}

static int is_contiguous(const Layout *layout) {
    int64_t step = 1;
    for (int64_t i = layout->dim - 1; i >= 0; i--) {
        if (layout->sizes[i] != 1 && layout->strides[i] != step) return count(layout) == 0;
        step *= layout->sizes[i];
    }
    return 1;
}

static int same_shape(const Layout *a, const Layout *b) {
    return a->dim == b->dim && memcmp(a->sizes, b->sizes, a->dim * sizeof *a->sizes) == 0;
}

// A new tuple of the sizes, and one of a new tensor's strides; a contiguous one may have others
// where a size is 1.
static int new_layout(const Layout *layout, PyObject **shape, PyObject **strides) {
    long long step = 1;
    *shape = PyTuple_New(layout->dim);
    *strides = PyTuple_New(layout->dim);
    if (*shape == NULL || *strides == NULL) return -1;
    for (int64_t i = layout->dim - 1; i >= 0; i--) {
        PyTuple_SET_ITEM(*shape, i, PyLong_FromLongLong(layout->sizes[i]));
        PyTuple_SET_ITEM(*strides, i, PyLong_FromLongLong(step));
        step *= layout->sizes[i];
    }
    return PyErr_Occurred() ? -1 : 0;
}

// The address of its first element as a new object.
static PyObject *pointer_of(PyObject *object) {
    void *tensor = tensor_in(object), *pointer;
    if (tensor == NULL || ask_torch(torch_data_ptr(tensor, &pointer)) < 0) return NULL;
    return PyLong_FromVoidPtr(pointer);
}

// Finds all that, by a tensor of two rows and three columns; an exception where it is not as here.
static int find_tensors(PyObject *example) {
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) {
        torch_data_ptr = dlsym(library, "aoti_torch_get_data_ptr");
        torch_dim = dlsym(library, "aoti_torch_get_dim");
        torch_sizes = dlsym(library, "aoti_torch_get_sizes");
        torch_strides = dlsym(library, "aoti_torch_get_strides");
    }
    PyObject *held = PyObject_GetAttrString(example, "_cdata"), *found = NULL;
    PyObject *pointer = held == NULL ? NULL : PyObject_CallMethod(example, "data_ptr", NULL);
    void *address = pointer == NULL ? NULL : PyLong_AsVoidPtr(held);
    Py_ssize_t size = Py_TYPE(example)->tp_basicsize;
    Layout layout;
    place = sizeof(PyObject);
    while (place < size && *(void **)((char *)example + place) != address) place += sizeof address;
    if (address != NULL && place < size && torch_data_ptr && torch_dim &&
        torch_sizes && torch_strides && layout_of(example, &layout) == 0 &&
        layout.dim == 2 && layout.sizes[0] == 2 && layout.sizes[1] == 3 &&
        layout.strides[0] == 3 && layout.strides[1] == 1)
        found = pointer_of(example);
    int answer = found == NULL ? 0 : PyObject_RichCompareBool(found, pointer, Py_EQ);
    Py_XDECREF(held);
    Py_XDECREF(pointer);
    Py_XDECREF(found);
    if (answer != 1 && !PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "torch's tensors are not as direct.c knows them");
    return answer == 1 ? 0 : -1;
}

// --- the forward --------------------------------------------------------------------------------

// Whether a mode may want to see calls; `function_modes` is in Python, and asked where there is any.
static int is_in_mode(void) {
    int answer = truth(call0(any_function_mode));
    return answer == 1 ? truth(call0(function_modes)) : answer;
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

// Whether forward-mode AD may go on.
static int is_dual(void) {
    PyObject *level = PyDict_GetItemWithError(forward_ad, s__current_level);
    if (level == NULL) return PyErr_Occurred() ? -1 : 1;
    return PyLong_AsLong(level) >= 0;
}

// Whether plain eager execution goes on, in which a kernel may be launched on pointers. Fills in x
// with the first input's layout then.
static int may_launch(Caller *self, PyObject *const *inputs, Layout *x) {
    PyObject *given[INPUTS];
    size_t n = 0;
    given[n++] = inputs[0];
    if (self->adds) given[n++] = inputs[1];
    if (self->has_weight) given[n++] = inputs[2];
    if (self->has_bias) given[n++] = inputs[3];
    int answer = is_object(PyObject_Vectorcall(self->check, given, n, NULL), Py_True);
    if (answer != 1) return answer;
    answer = is_object(call0(is_grad_enabled), self->grad);
    if (answer == 1 && self->autocast != Py_None)
        answer = is_object(call1(autocast_dtype, PyTuple_GET_ITEM(self->autocast, 0)),
                           PyTuple_GET_ITEM(self->autocast, 1));
    if (answer != 1) return answer;
    if (PyList_GET_SIZE(counters) > 0) return 0;
    answer = is_dual();
    if (answer == 0) answer = is_in_mode();
    if (answer != 0) return answer < 0 ? -1 : 0;
    answer = has_hooks(self->hooks, s_launch_enter_hook);
    if (answer != 0) return answer < 0 ? -1 : 0;
    answer = has_hooks(self->hooks, s_launch_exit_hook);
    if (answer != 0) return answer < 0 ? -1 : 0;
    long long device;
    if (integer(call0(current_device), &device) < 0) return -1;
    if (device != self->device) return 0;
    Layout residual;
    if (layout_of(inputs[0], x) < 0) return -1;
    if (!is_contiguous(x) || !self->adds) return is_contiguous(x);
    if (layout_of(inputs[1], &residual) < 0) return -1;
    return is_contiguous(&residual) && same_shape(x, &residual);
}

// A new contiguous tensor, and its pointer.
static int allocate(PyObject *shape, PyObject *strides, PyObject *dtype, PyObject **tensor,
                    PyObject **pointer) {
    PyObject *arguments[] = {shape, strides, dtype};
    *tensor = PyObject_Vectorcall(empty, arguments, 3, NULL);
    *pointer = *tensor == NULL ? NULL : pointer_of(*tensor);
    return *pointer == NULL ? -1 : 1;
}

// What autograd's Functions are given for a launch: (caller, n_rows, pointers), as in Python.
static PyObject *prepare(Caller *self, PyObject *const *pointers, long long n_rows) {
    PyObject *rows = PyLong_FromLongLong(n_rows), *prepared = NULL;
    PyObject *read = PyTuple_Pack(INPUTS, pointers[0], pointers[1], pointers[2], pointers[3]);
    if (rows != NULL && read != NULL) prepared = PyTuple_Pack(3, self, rows, read);
    Py_XDECREF(rows);
    Py_XDECREF(read);
    return prepared;
}

// `apply_linked`: (y, summed, summed again).
static PyObject *call_linked(Caller *self, PyObject *const *inputs, PyObject *prepared) {
    PyObject *vectors = PyTuple_Pack(2, inputs[2], inputs[3]), *made = PyList_New(0);
    PyObject *summed = NULL, *normed = NULL, *outputs = NULL;
    if (vectors == NULL || made == NULL) goto done;
    PyObject *first[] = {inputs[0], inputs[1], vectors, self->eps, self->spec, prepared, made};
    summed = PyObject_Vectorcall(apply_sum, first, 7, NULL);
    if (summed == NULL) goto done;
    PyObject *second[] = {summed, inputs[2], inputs[3], made};
    normed = PyObject_Vectorcall(apply_norm_of_sum, second, 4, NULL);
    if (normed != NULL)
        outputs = PyTuple_Pack(3, PyTuple_GET_ITEM(normed, 0), summed, PyTuple_GET_ITEM(normed, 1));
done:
    Py_XDECREF(vectors);
    Py_XDECREF(made);
    Py_XDECREF(summed);
    Py_XDECREF(normed);
    return outputs;
}

static PyObject *call_training(Caller *self, PyObject *const *inputs, PyObject *const *pointers,
                               long long n_rows) {
    PyObject *prepared = prepare(self, pointers, n_rows), *outputs;
    if (prepared == NULL) return NULL;
    if (self->train == apply_linked) {
        outputs = call_linked(self, inputs, prepared);
    } else {
        PyObject *arguments[] = {inputs[0], inputs[1], inputs[2], inputs[3],
                                 self->eps, self->spec, prepared};
        outputs = PyObject_Vectorcall(self->train, arguments, 7, NULL);
    }
    Py_DECREF(prepared);
    if (outputs == NULL || self->adds) return outputs;
    return Py_BuildValue("(NO)", outputs, Py_None);
}

// --- the launch --------------------------------------------------------------------------------
//
// A `Launcher` is a compiled kernel with all that does not change from launch to launch. It asks
// the driver for what Triton's launcher asks, in less of the CPU's time, for it has nothing to find
// out: neither types of arguments nor which of them the kernel was compiled for.

enum { MAX_VARYING = 16, MAX_FIXED = 16, SCRATCHES = 2 };

#ifdef CUDA_VERSION
typedef struct {
    PyObject_HEAD
    CUfunction function;
    CUcontext context;
    unsigned threads, shared;
    int dependent;
    Py_ssize_t n_varying, n_fixed;
    char passed[MAX_VARYING];
    unsigned long long fixed[MAX_FIXED];
} Launcher;

static PyTypeObject LauncherType;

// Functions of the driver, from the library that torch and Triton have loaded.
static CUresult (*cu_launch)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*cu_get_context)(CUcontext *);
static CUresult (*cu_set_context)(CUcontext);
static CUresult (*cu_error)(CUresult, const char **);

static int find_driver(void) {
    if (cu_launch != NULL) return 0;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (library != NULL) {
        cu_get_context = dlsym(library, "cuCtxGetCurrent");
        cu_set_context = dlsym(library, "cuCtxSetCurrent");
        cu_error = dlsym(library, "cuGetErrorString");
        if (cu_get_context && cu_set_context && cu_error)
            cu_launch = dlsym(library, "cuLaunchKernelEx");
    }
    if (cu_launch != NULL) return 0;
    PyErr_SetString(PyExc_RuntimeError, "libcuda.so.1 has no cuLaunchKernelEx");
    return -1;
}

// 0, or -1 with an exception.
static int check_driver(CUresult result) {
    const char *text = NULL;
    if (result == CUDA_SUCCESS) return 0;
    if (cu_error(result, &text) != CUDA_SUCCESS || text == NULL) text = "unknown error";
    PyErr_Format(PyExc_RuntimeError, "CUDA cannot launch a kernel: %s (error %d)", text, result);
    return -1;
}

// A pointer, None for NULL, or a number.
static int word_of(PyObject *object, unsigned long long *word) {
    *word = object == Py_None ? 0 : PyLong_AsUnsignedLongLong(object);
    return *word == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

static int start(Launcher *self, long long x, long long y, PyObject *stream_object,
                 PyObject *const *varying, Py_ssize_t n) {
    unsigned long long words[MAX_VARYING], scratch[SCRATCHES] = {0}, stream;
    void *parameters[MAX_VARYING + MAX_FIXED + SCRATCHES];
    size_t at = 0;
    if (n != self->n_varying) {
        PyErr_SetString(PyExc_TypeError, "a launch with another number of arguments");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!self->passed[i]) continue;
        if (word_of(varying[i], &words[i]) < 0) return -1;
        parameters[at++] = &words[i];
    }
    for (Py_ssize_t i = 0; i < self->n_fixed; i++) parameters[at++] = &self->fixed[i];
    for (int i = 0; i < SCRATCHES; i++) parameters[at++] = &scratch[i];
    if (word_of(stream_object, &stream) < 0) return -1;

    CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                   .value.programmaticStreamSerializationAllowed = 1};
    CUlaunchConfig config = {
        .gridDimX = x, .gridDimY = y, .gridDimZ = 1,
        .blockDimX = self->threads, .blockDimY = 1, .blockDimZ = 1,
        .sharedMemBytes = self->shared, .hStream = (CUstream)stream,
        .attrs = &attribute, .numAttrs = self->dependent ? 1 : 0};
    CUcontext context;
    CUresult result = cu_get_context(&context);
    if (result == CUDA_SUCCESS && context == NULL)  // a thread that has not used the GPU yet
        result = cu_set_context(self->context);
    if (result == CUDA_SUCCESS) {
        Py_BEGIN_ALLOW_THREADS  // the driver waits where its queue is full
        result = cu_launch(&config, self->function, parameters, NULL);
        Py_END_ALLOW_THREADS
    }
    return check_driver(result);
}

// (function, threads, shared, dependent, passed, fixed): the loaded kernel's handle, threads a
// block, bytes of shared memory, whether it may begin before the kernel before it has ended, a byte
// for each argument that varies, 0 where the kernel has no such parameter, and 8 bytes for each
// parameter that does not vary.
static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"function", "threads", "shared", "dependent", "passed", "fixed", NULL};
    unsigned long long function;
    unsigned threads, shared;
    const char *passed, *fixed;
    Py_ssize_t n_passed, n_fixed;
    int dependent;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KIIpy#y#", names, &function, &threads, &shared,
                                     &dependent, &passed, &n_passed, &fixed, &n_fixed))
        return NULL;
    if (n_passed > MAX_VARYING || n_fixed % 8 || n_fixed / 8 > MAX_FIXED) {
        PyErr_SetString(PyExc_ValueError, "too many arguments");
        return NULL;
    }
    if (find_driver() < 0) return NULL;
    Launcher *self = (Launcher *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->function = (CUfunction)function;
    self->threads = threads;
    self->shared = shared;
    self->dependent = dependent;
    self->n_varying = n_passed;
    self->n_fixed = n_fixed / 8;
    memcpy(self->passed, passed, n_passed);
    memcpy(self->fixed, fixed, n_fixed);
    int answer = check_driver(cu_get_context(&self->context));
    if (answer == 0 && self->context == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "no CUDA context is current");
        answer = -1;
    }
    if (answer < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

// (x, y, stream, *varying): a launch of x by y programs.
static PyObject *launcher_launch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    long long x = nargs < 3 ? -1 : PyLong_AsLongLong(args[0]);
    long long y = nargs < 3 ? -1 : PyLong_AsLongLong(args[1]);
    if (x <= 0 || y <= 0 || x > INT_MAX || y > INT_MAX) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected a grid and a stream");
        return NULL;
    }
    if (start((Launcher *)self, x, y, args[2], args + 3, nargs - 3) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject LauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fusedops_direct.Launcher",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = launcher_methods,
    .tp_new = launcher_new,
};
#endif

// Launch a grid of x by y programs, by a `Launcher` or by whatever takes the arguments of Triton's;
// what lies between the head and the tail is borrowed. -1: failed.
static int launch_kernel(PyObject *launch, long long x, long long y, PyObject *stream,
                         PyObject *head, PyObject *const *varying, Py_ssize_t n, PyObject *tail) {
#ifdef CUDA_VERSION
    if (Py_IS_TYPE(launch, &LauncherType))
        return start((Launcher *)launch, x, y, stream, varying, n);
#endif
    Py_ssize_t n_head = PyTuple_GET_SIZE(head), n_tail = PyTuple_GET_SIZE(tail), at = 0;
    PyObject *arguments = PyTuple_New(GRID_AND_STREAM + n_head + n + n_tail);
    if (arguments == NULL) return -1;
#define PUT_NEXT(object) PyTuple_SET_ITEM(arguments, at++, object)
    PUT_NEXT(PyLong_FromLongLong(x));
    PUT_NEXT(PyLong_FromLongLong(y));
    PUT_NEXT(PyLong_FromLong(1));
    PUT_NEXT(Py_NewRef(stream));
    for (Py_ssize_t i = 0; i < n_head; i++) PUT_NEXT(Py_NewRef(PyTuple_GET_ITEM(head, i)));
    for (Py_ssize_t i = 0; i < n; i++) PUT_NEXT(Py_NewRef(varying[i]));
    for (Py_ssize_t i = 0; i < n_tail; i++) PUT_NEXT(Py_NewRef(PyTuple_GET_ITEM(tail, i)));
#undef PUT_NEXT
    PyObject *launched = PyErr_Occurred() ? NULL : PyObject_Call(launch, arguments, NULL);
    Py_DECREF(arguments);
    Py_XDECREF(launched);
    return launched == NULL ? -1 : 0;
}

static PyObject *stream_of(Py_ssize_t device) {
    PyObject *number = PyLong_FromSsize_t(device);
    PyObject *stream = number == NULL ? NULL : call1(current_stream, number);
    Py_XDECREF(number);
    return stream;
}

// `allocate`, of one dimension.
static int allocate_vector(long long size, PyObject *dtype, PyObject **tensor,
                           PyObject **pointer) {
    int64_t sizes[] = {size};
    PyObject *shape = NULL, *strides = NULL;
    int answer = new_layout(&(Layout){1, sizes, NULL}, &shape, &strides);
    if (answer == 0) answer = allocate(shape, strides, dtype, tensor, pointer);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return answer;
}

// What a forward makes, in the kernel's order.
enum { Y, SUM, MEAN_OF_ROW, RSTD_OF_ROW, MADE };

static void drop(PyObject **objects, size_t n) {
    for (size_t i = 0; i < n; i++) Py_CLEAR(objects[i]);
}

// Launches the kernel and puts its results into `made`, None for those that there are not; rows is
// the number of rows as an object. -1: failed, and nothing made.
static int make_forward(Caller *self, PyObject *x, PyObject *const *pointers, PyObject *rows,
                        PyObject **made) {
    PyObject *made_ptr[MADE] = {NULL}, *stream = NULL, *shape = NULL, *strides = NULL;
    long long n_rows = PyLong_AsLongLong(rows);
    Layout layout;
    int answer = -1;
    for (int i = 0; i < MADE; i++) made[i] = NULL;
    if ((n_rows == -1 && PyErr_Occurred()) || layout_of(x, &layout) < 0 ||
        new_layout(&layout, &shape, &strides) < 0 ||
        allocate(shape, strides, self->y_dtype, &made[Y], &made_ptr[Y]) < 0)
        goto done;
    if (self->adds &&
        allocate(shape, strides, self->sum_dtype, &made[SUM], &made_ptr[SUM]) < 0)
        goto done;
    for (int i = MEAN_OF_ROW; self->statistics != Py_None && i < MADE; i++)
        if ((i == RSTD_OF_ROW || self->centered) &&
            allocate_vector(n_rows, self->statistics, &made[i], &made_ptr[i]) < 0)
            goto done;
    for (int i = 0; i < MADE; i++) {
        if (made[i] != NULL) continue;
        made[i] = Py_NewRef(Py_None);
        made_ptr[i] = Py_NewRef(Py_None);
    }
    stream = stream_of(self->device);
    if (stream == NULL) goto done;
    PyObject *varying[] = {pointers[0], pointers[1], pointers[2], pointers[3], made_ptr[Y],
                           made_ptr[SUM], made_ptr[MEAN_OF_ROW], made_ptr[RSTD_OF_ROW], rows};
    long long programs = (n_rows + self->block_rows - 1) / self->block_rows;
    answer = launch_kernel(self->launch, programs, 1, stream, self->head, varying,
                           sizeof varying / sizeof *varying, self->tail);
done:
    if (answer < 0) drop(made, MADE);
    drop(made_ptr, MADE);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    Py_XDECREF(stream);
    return answer;
}

// The first n results of a forward as a tuple.
static PyObject *run_forward(Caller *self, PyObject *x, PyObject *const *pointers, PyObject *rows,
                             Py_ssize_t n) {
    PyObject *made[MADE], *result = NULL;
    if (make_forward(self, x, pointers, rows, made) < 0) return NULL;
    result = PyTuple_New(n);
    for (Py_ssize_t i = 0; result != NULL && i < n; i++)
        PyTuple_SET_ITEM(result, i, Py_NewRef(made[i]));
    drop(made, MADE);
    return result;
}

// `direct.launch`, which autograd's Functions ask for with what `prepare` made:
// (x, n_rows, pointers) -> (y, summed, mean, rstd).
static PyObject *caller_launch(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != INPUTS) {
        PyErr_SetString(PyExc_TypeError, "expected x, the number of rows and four pointers");
        return NULL;
    }
    return run_forward((Caller *)object, args[0], &PyTuple_GET_ITEM(args[2], 0), args[1], MADE);
}

// (x, residual, weight, bias) -> (y, summed), or None.
static PyObject *caller_vectorcall(PyObject *object, PyObject *const *inputs, size_t nargsf,
                                   PyObject *names) {
    Caller *self = (Caller *)object;
    if (PyVectorcall_NARGS(nargsf) != INPUTS || (names && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "expected x, residual, weight and bias");
        return NULL;
    }
    Layout x;
    int answer = may_launch(self, inputs, &x);
    if (answer < 0) return NULL;
    if (answer == 0) Py_RETURN_NONE;

    int wanted[INPUTS] = {1, self->adds, self->has_weight, self->has_bias};
    PyObject *pointers[INPUTS] = {NULL, NULL, NULL, NULL}, *result = NULL, *rows = NULL;
    unsigned long long bits = 0;
    long long n_rows = count(&x) / self->n_cols;
    for (int i = 0; i < INPUTS; i++) {
        pointers[i] = wanted[i] ? pointer_of(inputs[i]) : Py_NewRef(Py_None);
        if (pointers[i] == NULL) goto done;
        if (wanted[i]) bits |= PyLong_AsUnsignedLongLongMask(pointers[i]);
    }
    if (bits & MISALIGNED || n_rows <= 0 || n_rows > INT_MAX)
        result = Py_NewRef(Py_None);
    else if (self->train != Py_None)
        result = call_training(self, inputs, pointers, n_rows);
    else if ((rows = PyLong_FromLongLong(n_rows)) != NULL)
        result = run_forward(self, inputs[0], pointers, rows, 2);
done:
    drop(pointers, INPUTS);
    Py_XDECREF(rows);
    return result;
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"check",    "grad",      "train",      "autocast", "hooks",
                            "launch",   "head",      "tail",       "y_dtype",  "sum_dtype",
                            "statistics", "eps",     "spec",       "plan",     "n_cols",
                            "block_rows", "device",  "has_weight", "has_bias", "centered", NULL};
    if (!PyList_Check(counters) || !PyDict_Check(forward_ad)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of counters and forward_ad's dict");
        return NULL;
    }
    Caller *self = (Caller *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOOO!O!OOOOOOnnnppp", names, &self->check,
                                     &self->grad, &self->train, &self->autocast, &self->hooks,
                                     &self->launch, &PyTuple_Type, &self->head, &PyTuple_Type,
                                     &self->tail, &self->y_dtype, &self->sum_dtype,
                                     &self->statistics, &self->eps, &self->spec, &self->plan,
                                     &self->n_cols, &self->block_rows, &self->device,
                                     &self->has_weight, &self->has_bias, &self->centered)) {
        self->check = NULL;  // nothing is owned yet
        Py_DECREF(self);
        return NULL;
    }
    self->vectorcall = caller_vectorcall;
    self->adds = self->sum_dtype != Py_None;
#define TAKE(name) Py_INCREF(self->name);
    OWNED(TAKE)
    return (PyObject *)self;
}

static void caller_dealloc(PyObject *object) {
    Caller *self = (Caller *)object;
#define RELEASE(name) Py_DECREF(self->name);
    if (self->check != NULL) {
        OWNED(RELEASE)
    }
    Py_XDECREF(self->kept);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef caller_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))caller_launch, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject CallerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fusedops_direct.Caller",
    .tp_basicsize = sizeof(Caller),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Caller, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_methods = caller_methods,
    .tp_new = caller_new,
    .tp_dealloc = caller_dealloc,
};

// --- the backward ------------------------------------------------------------------------------

// The places in a `Plan` of fusedops/direct_backward.py, and those of the tensors that a call reads.
enum { MAIN_LAUNCH, MAIN_HEAD, MAIN_TAIL, BLOCK_ROWS, MOST_PROGRAMS, SUM_LAUNCH, SUM_HEAD, SUM_TAIL,
       GRID_X, GRID_Y, DEVICE, HOOKS, KEPT, PLANNED };
enum { DY, DSUM, S, WEIGHT, MEAN, RSTD, READ };
enum { SUMS_ALIGNED = 4 };  // elements of fp32, or fp64: 16 bytes

// Whether a profiler hooks itself into the launches of this plan.
static int is_watched(PyObject *plan) {
    PyObject *runtime = PyTuple_GET_ITEM(plan, HOOKS);
    int answer = has_hooks(runtime, s_launch_enter_hook);
    return answer == 0 ? has_hooks(runtime, s_launch_exit_hook) : answer;
}

// Whether the device of this number is the current one.
static int is_current(PyObject *number) {
    long long current, device = PyLong_AsLongLong(number);
    if (device == -1 && PyErr_Occurred()) return -1;
    return integer(call0(current_device), &current) < 0 ? -1 : current == device;
}

// Whether these tensors, None for those that are missing, are as the plan's kernels expect them.
static int may_launch_backward(PyObject *plan, PyObject *const *given, long long *n_rows,
                               long long *n_cols) {
    if (given[DY] == Py_None || given[S] == Py_None || given[RSTD] == Py_None) return 0;
    int answer = is_current(PyTuple_GET_ITEM(plan, DEVICE));
    if (answer != 1) return answer;
    Layout layouts[READ];
    for (int i = DY; i < READ; i++) {
        if (given[i] == Py_None) continue;
        if (layout_of(given[i], &layouts[i]) < 0) return -1;
        if (!is_contiguous(&layouts[i])) return 0;
    }
    if (!same_shape(&layouts[DY], &layouts[S])) return 0;
    if (given[DSUM] != Py_None && !same_shape(&layouts[DSUM], &layouts[S])) return 0;
    *n_rows = count(&layouts[RSTD]);
    *n_cols = *n_rows == 0 ? 0 : count(&layouts[S]) / *n_rows;
    if (*n_rows * *n_cols != count(&layouts[S])) return 0;
    if (given[MEAN] != Py_None && count(&layouts[MEAN]) != *n_rows) return 0;
    if (given[WEIGHT] != Py_None && count(&layouts[WEIGHT]) != *n_cols) return 0;
    answer = is_watched(plan);
    return answer < 0 ? -1 : !answer;
}

// The gradients of the columns, dweight and dbias, and their partial sums in one new tensor: a place
// for each of `tensors` and `pointers`. Not made where the dtype is None.
enum { DWEIGHT, DBIAS, SUMS, COLUMNS };

static int allocate_columns(PyObject *const *dtypes, PyObject *sums_dtype, long long programs,
                            long long n_cols, PyObject **tensors, PyObject **pointers,
                            PyObject **sums_pointers) {
    long long wanted = 0, itemsize, most = programs * n_cols;
    most += -most & (SUMS_ALIGNED - 1);
    for (int i = DWEIGHT; i <= DBIAS; i++) {
        if (dtypes[i] == Py_None) {
            tensors[i] = Py_NewRef(Py_None);
            pointers[i] = Py_NewRef(Py_None);
            sums_pointers[i] = Py_NewRef(Py_None);
        } else {
            wanted++;
            if (allocate_vector(n_cols, dtypes[i], &tensors[i], &pointers[i]) < 0) return -1;
        }
    }
    if (wanted == 0) return 0;
    if (allocate_vector(wanted * most, sums_dtype, &tensors[SUMS], &pointers[SUMS]) < 0) return -1;
    if (integer(PyObject_GetAttr(sums_dtype, s_itemsize), &itemsize) < 0) return -1;
    unsigned long long next = PyLong_AsUnsignedLongLong(pointers[SUMS]);
    for (int i = DWEIGHT; i <= DBIAS; i++) {
        if (sums_pointers[i] != NULL) continue;
        sums_pointers[i] = PyLong_FromUnsignedLongLong(next);
        if (sums_pointers[i] == NULL) return -1;
        next += most * itemsize;
    }
    return 0;
}

static PyObject *new_like(PyObject *tensor, PyObject **pointer) {
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype), *made = NULL;
    PyObject *shape = NULL, *strides = NULL;
    Layout layout;
    if (dtype != NULL && layout_of(tensor, &layout) == 0 &&
        new_layout(&layout, &shape, &strides) == 0)
        allocate(shape, strides, dtype, &made, pointer);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return made;
}

static long long number_in(PyObject *plan, int index) {
    return PyLong_AsLongLong(PyTuple_GET_ITEM(plan, index));
}

enum { GRADIENTS = 3 };  // ds, dweight and dbias

// Launches the plan's kernels and puts the gradients into `found`, None for those that are not
// wanted. 0: these pointers or this number of rows they do not take.
static int run_backward(PyObject *plan, PyObject *wanted, PyObject *const *given, long long n_rows,
                        long long n_cols, PyObject **found) {
    PyObject *read[READ] = {NULL}, *columns[COLUMNS] = {NULL}, *pointers[COLUMNS] = {NULL};
    PyObject *sums[2] = {NULL}, *ds_ptr = NULL;
    PyObject *ds = NULL, *stream = NULL, *sums_dtype = NULL, *rows = NULL, *programs_object = NULL;
    unsigned long long bits = 0;
    int answer = -1;
    for (int i = 0; i < READ; i++) {
        read[i] = given[i] == Py_None ? Py_NewRef(Py_None) : pointer_of(given[i]);
        if (read[i] == NULL) goto done;
        if (given[i] != Py_None) bits |= PyLong_AsUnsignedLongLongMask(read[i]);
    }
    if (bits & MISALIGNED || n_rows <= 0 || n_rows > INT_MAX) {
        answer = 0;
        goto done;
    }
    long long block_rows = number_in(plan, BLOCK_ROWS), most = number_in(plan, MOST_PROGRAMS);
    long long programs = (n_rows + block_rows - 1) / block_rows;
    if (programs > most) programs = most;
    sums_dtype = PyObject_GetAttr(given[RSTD], s_dtype);
    stream = call1(current_stream, PyTuple_GET_ITEM(plan, DEVICE));
    rows = PyLong_FromLongLong(n_rows);
    programs_object = PyLong_FromLongLong(programs);
    if (sums_dtype == NULL || stream == NULL || rows == NULL || programs_object == NULL) goto done;
    if (PyTuple_GET_ITEM(wanted, 0) == Py_True) {
        ds = new_like(given[S], &ds_ptr);
        if (ds == NULL || ds_ptr == NULL) goto done;
    } else {
        ds = Py_NewRef(Py_None);
        ds_ptr = Py_NewRef(Py_None);
    }
    // Partial sums are used up before anything else of this stream can be given their memory.
    if (allocate_columns(&PyTuple_GET_ITEM(wanted, 1), sums_dtype, programs, n_cols, columns,
                         pointers, sums) < 0)
        goto done;
    PyObject *varying[] = {read[S], read[DY], read[DSUM], read[WEIGHT], read[MEAN], read[RSTD],
                           ds_ptr, sums[DWEIGHT], sums[DBIAS], pointers[DWEIGHT], pointers[DBIAS],
                           rows};
    if (launch_kernel(PyTuple_GET_ITEM(plan, MAIN_LAUNCH), programs, 1, stream,
                      PyTuple_GET_ITEM(plan, MAIN_HEAD), varying,
                      sizeof varying / sizeof *varying, PyTuple_GET_ITEM(plan, MAIN_TAIL)) < 0)
        goto done;
    if (programs > 1 && PyTuple_GET_ITEM(plan, SUM_LAUNCH) != Py_None) {
        PyObject *summed[] = {sums[DWEIGHT], sums[DBIAS], pointers[DWEIGHT], pointers[DBIAS],
                              programs_object};
        if (launch_kernel(PyTuple_GET_ITEM(plan, SUM_LAUNCH), number_in(plan, GRID_X),
                          number_in(plan, GRID_Y), stream, PyTuple_GET_ITEM(plan, SUM_HEAD),
                          summed, sizeof summed / sizeof *summed,
                          PyTuple_GET_ITEM(plan, SUM_TAIL)) < 0)
            goto done;
    }
    found[0] = Py_NewRef(ds);
    found[1] = Py_NewRef(columns[DWEIGHT]);
    found[2] = Py_NewRef(columns[DBIAS]);
    answer = 1;
done:
    drop(read, READ);
    drop(columns, COLUMNS);
    drop(pointers, COLUMNS);
    drop(sums, 2);
    Py_XDECREF(ds);
    Py_XDECREF(ds_ptr);
    Py_XDECREF(stream);
    Py_XDECREF(rows);
    Py_XDECREF(programs_object);
    Py_XDECREF(sums_dtype);
    return answer;
}

// (plan, wanted, dy, dsum, s, weight, mean, rstd) -> (ds, dweight, dbias), or None.
static PyObject *launch_backward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 + READ || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != PLANNED ||
        !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != GRADIENTS) {
        PyErr_SetString(PyExc_TypeError, "expected a plan, what is wanted, and six tensors");
        return NULL;
    }
    PyObject *const *given = args + 2, *found[GRADIENTS] = {NULL}, *result = NULL;
    long long n_rows, n_cols;
    int answer = may_launch_backward(args[0], given, &n_rows, &n_cols);
    if (answer == 1) answer = run_backward(args[0], args[1], given, n_rows, n_cols, found);
    if (answer == 0) Py_RETURN_NONE;
    if (answer == 1) result = PyTuple_Pack(GRADIENTS, found[0], found[1], found[2]);
    drop(found, GRADIENTS);
    return result;
}

// --- autograd's Functions -----------------------------------------------------------------------
//
// `NormFunction`, `SumFunction` and `NormOfSum` of fusedops/autograd.py. In the place of their
// `forward` stands the C, and autograd's nodes have an `apply` of C where torch has Python that
// calls `backward`. For what is not done here their forms in Python are called.

// The places in a `Kept`, and in a `Fit` of fusedops/direct_backward.py.
enum { KEPT_EPS, KEPT_SPEC, X_DTYPE, RESIDUAL_DTYPE, BIAS_DTYPE, FITS, ALL_KEPT };
enum { CHECK, FITTING_PLAN, FITTING_WANTED, FITTING_COLUMNS, FITTED };
enum { SAVED_S, SAVED_WEIGHT, SAVED_MEAN, SAVED_RSTD, SAVED };
enum { ALL_FITS = 16 };  // a bit each for ds, dweight and dbias being wanted, and dsum given

// The Caller that has prepared a call, NULL without an exception where none has.
static Caller *caller_of(PyObject *prepared) {
    if (!PyTuple_CheckExact(prepared) || PyTuple_GET_SIZE(prepared) != 3) return NULL;
    PyObject *caller = PyTuple_GET_ITEM(prepared, 0), *pointers = PyTuple_GET_ITEM(prepared, 2);
    if (!Py_IS_TYPE(caller, &CallerType) || !PyTuple_CheckExact(pointers) ||
        PyTuple_GET_SIZE(pointers) != INPUTS)
        return NULL;
    return (Caller *)caller;
}

static int make_prepared(PyObject *prepared, PyObject *x, PyObject **made) {
    return make_forward(caller_of(prepared), x, &PyTuple_GET_ITEM(PyTuple_GET_ITEM(prepared, 2), 0),
                        PyTuple_GET_ITEM(prepared, 1), made);
}

// The `Kept` of this caller's calls. It knows nothing of the caller, which owns it.
static PyObject *kept_of(Caller *self, PyObject *x, PyObject *residual, PyObject *bias) {
    if (self->kept == NULL) {
        PyObject *fits = PyList_New(ALL_FITS);
        if (fits == NULL) return NULL;
        for (Py_ssize_t i = 0; i < ALL_FITS; i++) PyList_SET_ITEM(fits, i, Py_NewRef(Py_None));
        PyObject *arguments[] = {x, residual, bias, self->eps, self->spec, fits};
        PyObject *kept = PyObject_Vectorcall(keep, arguments, 6, NULL);
        Py_DECREF(fits);
        if (kept == NULL) return NULL;
        Py_XSETREF(self->kept, kept);
    }
    return Py_NewRef(self->kept);
}

// What every forward leaves in its node; kept may be NULL, for an exception.
static int leave_kept(PyObject *ctx, PyObject *kept) {
    if (kept == NULL || PyObject_SetAttr(ctx, s_materialize_grads, Py_False) < 0) return -1;
    return PyObject_SetAttr(ctx, s_kept, kept);
}

// An attribute of the node that is a tuple of n or more.
static PyObject *tuple_of(PyObject *ctx, PyObject *name, Py_ssize_t n) {
    PyObject *found = PyObject_GetAttr(ctx, name);
    if (found != NULL && (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) < n)) {
        PyErr_Format(PyExc_TypeError, "%U: expected a tuple of %zd", name, n);
        Py_CLEAR(found);
    }
    return found;
}

static int give_tuple(PyObject *ctx, PyObject *name, PyObject *tuple) {
    int answer = tuple == NULL ? -1 : PyObject_SetAttr(ctx, name, tuple);
    Py_XDECREF(tuple);
    return answer;
}

// Marks what does not depend on any of the node's first n inputs.
static int mark(PyObject *ctx, PyObject *output, Py_ssize_t n) {
    PyObject *needs = tuple_of(ctx, s_needs_input_grad, n);
    int needed = needs == NULL;
    for (Py_ssize_t i = 0; !needed && i < n; i++)
        needed = PyTuple_GET_ITEM(needs, i) == Py_True;
    Py_XDECREF(needs);
    if (needs == NULL) return -1;
    return needed ? 0 : give_tuple(ctx, s_non_differentiable, PyTuple_Pack(1, output));
}

// `NormFunction.forward`: (ctx, x, residual, weight, bias, eps, spec, prepared).
static PyObject *forward_norm(PyObject *unused, PyObject *const *args, Py_ssize_t nargs) {
    Caller *caller = nargs == 8 ? caller_of(args[7]) : NULL;
    if (caller == NULL) return PyObject_Vectorcall(norm_forward, args, nargs, NULL);
    PyObject *ctx = args[0], *x = args[1], *made[MADE], *result = NULL;
    if (make_prepared(args[7], x, made) < 0) return NULL;
    PyObject *kept = kept_of(caller, x, args[2], args[4]);
    int answer = leave_kept(ctx, kept);
    if (answer == 0)
        answer = give_tuple(ctx, s_to_save,
                            PyTuple_Pack(SAVED, caller->adds ? made[SUM] : x, args[3],
                                         made[MEAN_OF_ROW], made[RSTD_OF_ROW]));
    if (answer == 0 && caller->adds) answer = mark(ctx, made[SUM], 2);
    if (answer == 0)
        result = caller->adds ? PyTuple_Pack(2, made[Y], made[SUM]) : Py_NewRef(made[Y]);
    Py_XDECREF(kept);
    drop(made, MADE);
    return result;
}

// `SumFunction.forward`: (ctx, x, residual, vectors, eps, spec, prepared, made).
static PyObject *forward_sum(PyObject *unused, PyObject *const *args, Py_ssize_t nargs) {
    Caller *caller = nargs == 8 && PyList_CheckExact(args[7]) && PyTuple_CheckExact(args[3]) &&
                             PyTuple_GET_SIZE(args[3]) == 2 ? caller_of(args[6]) : NULL;
    if (caller == NULL) return PyObject_Vectorcall(sum_forward, args, nargs, NULL);
    PyObject *ctx = args[0], *x = args[1], *made[MADE], *result = NULL;
    if (make_prepared(args[6], x, made) < 0) return NULL;
    PyObject *kept = kept_of(caller, x, args[2], PyTuple_GET_ITEM(args[3], 1));
    int answer = leave_kept(ctx, kept);
    PyObject *const handed[] = {made[Y], made[MEAN_OF_ROW], made[RSTD_OF_ROW], kept};
    for (int i = 0; answer == 0 && i < 4; i++) answer = PyList_Append(args[7], handed[i]);
    if (answer == 0) result = Py_NewRef(made[SUM]);
    Py_XDECREF(kept);
    drop(made, MADE);
    return result;
}

// `NormOfSum.forward`: (ctx, s, weight, bias, made).
static PyObject *forward_norm_of_sum(PyObject *unused, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyList_CheckExact(args[4]) || PyList_GET_SIZE(args[4]) != 4)
        return PyObject_Vectorcall(norm_of_sum_forward, args, nargs, NULL);
    PyObject *ctx = args[0], *made[4], *result = NULL;
    for (int i = 0; i < 4; i++) made[i] = Py_NewRef(PyList_GET_ITEM(args[4], i));
    PyObject *after = call1(detach, args[1]);
    int answer = after == NULL ? -1 : leave_kept(ctx, made[3]);
    if (answer == 0)
        answer = give_tuple(ctx, s_to_save,
                            PyTuple_Pack(SAVED, args[1], args[2], made[1], made[2]));
    if (answer == 0) answer = mark(ctx, after, 1);
    if (answer == 0) result = PyTuple_Pack(2, made[0], after);
    Py_XDECREF(after);
    drop(made, 4);
    return result;
}

// What serves a backward, a new reference; NULL without an exception where nothing is known to.
static PyObject *fit_for(PyObject *kept, PyObject *const *given, const int *needs) {
    PyObject *fits = PyTuple_GET_ITEM(kept, FITS);
    if (given[DY] == Py_None || !PyList_CheckExact(fits) || PyList_GET_SIZE(fits) != ALL_FITS)
        return NULL;
    int place = (given[DSUM] != Py_None) << GRADIENTS;
    for (int i = 0; i < GRADIENTS; i++) place |= needs[i] << i;
    PyObject *fit = PyList_GET_ITEM(fits, place);
    return PyTuple_Check(fit) && PyTuple_GET_SIZE(fit) == FITTED ? Py_NewRef(fit) : NULL;
}

// Whether a kernel may read these tensors, and they are as those that the `Fit` was made for. The
// guard has compared their rank and width, and strides where there is but one.
static int fits_backward(PyObject *fit, PyObject *const *given, long long n_cols,
                         long long *n_rows) {
    PyObject *checked[READ];
    size_t n = 0;
    static const int order[] = {S, DY, DSUM, WEIGHT, MEAN, RSTD};
    for (size_t i = 0; i < READ; i++)
        if (given[order[i]] != Py_None) checked[n++] = given[order[i]];
    int answer = is_object(call0(is_grad_enabled), Py_False);
    if (answer == 1)
        answer = is_object(PyObject_Vectorcall(PyTuple_GET_ITEM(fit, CHECK), checked, n, NULL),
                           Py_True);
    PyObject *plan = PyTuple_GET_ITEM(fit, FITTING_PLAN);
    if (answer == 1) answer = is_current(PyTuple_GET_ITEM(plan, DEVICE));
    if (answer != 1) return answer;
    answer = is_dual();
    if (answer == 0) answer = is_watched(plan);
    if (answer != 0) return answer < 0 ? -1 : 0;
    Layout layout;
    if (layout_of(given[RSTD], &layout) < 0) return -1;
    *n_rows = count(&layout);
    for (int i = DY; i <= S; i++) {
        if (given[i] == Py_None) continue;
        if (layout_of(given[i], &layout) < 0) return -1;
        if (!is_contiguous(&layout) || count(&layout) != *n_rows * n_cols) return 0;
    }
    if (given[MEAN] == Py_None) return 1;
    return layout_of(given[MEAN], &layout) < 0 ? -1 : count(&layout) == *n_rows;
}

// The gradients of a norm that has saved these tensors into `found`; 0: Python must see to it.
static int find_gradients(PyObject *kept, PyObject *saved, PyObject *dy, PyObject *dsum,
                          const int *needs, PyObject **found) {
    PyObject *given[READ];
    given[DY] = dy;
    given[DSUM] = dsum;
    given[S] = PyTuple_GET_ITEM(saved, SAVED_S);
    given[WEIGHT] = PyTuple_GET_ITEM(saved, SAVED_WEIGHT);
    given[MEAN] = PyTuple_GET_ITEM(saved, SAVED_MEAN);
    given[RSTD] = PyTuple_GET_ITEM(saved, SAVED_RSTD);
    PyObject *fit = fit_for(kept, given, needs);
    if (fit == NULL) return 0;
    long long n_rows, n_cols = number_in(fit, FITTING_COLUMNS);
    int answer = fits_backward(fit, given, n_cols, &n_rows);
    if (answer == 1)
        answer = run_backward(PyTuple_GET_ITEM(fit, FITTING_PLAN),
                              PyTuple_GET_ITEM(fit, FITTING_WANTED), given, n_rows, n_cols,
                              found);
    Py_DECREF(fit);
    return answer;
}

// What was not needed or is None is None; the rest has this dtype.
static PyObject *cast(PyObject *tensor, int needed, PyObject *dtype) {
    if (PyErr_Occurred()) return NULL;  // in the cast before
    if (!needed || tensor == Py_None) Py_RETURN_NONE;
    PyObject *own = PyObject_GetAttr(tensor, s_dtype);
    if (own == NULL) return NULL;
    Py_DECREF(own);  // torch keeps its dtypes
    return own == dtype ? Py_NewRef(tensor) : PyObject_CallMethodOneArg(tensor, s_to, dtype);
}

static PyObject *kept_in(PyObject *ctx) { return tuple_of(ctx, s_kept, ALL_KEPT); }

// The gradients of a node's inputs in the end, n tensors that are taken and then None.
static PyObject *gradients_of_inputs(PyObject **tensors, Py_ssize_t n, Py_ssize_t inputs) {
    PyObject *result = PyTuple_New(inputs);
    for (Py_ssize_t i = 0; i < inputs; i++) {
        PyObject *gradient = i < n ? tensors[i] : Py_NewRef(Py_None);
        if (gradient == NULL) Py_CLEAR(result);
        if (result == NULL)
            Py_XDECREF(gradient);
        else
            PyTuple_SET_ITEM(result, i, gradient);
    }
    return result;
}

// A node's backward of (dy, dsum): that of `NormFunction`, or where it is linked of `NormOfSum`.
static PyObject *apply_backward(PyObject *ctx, PyObject *const *grads, Py_ssize_t n, int linked) {
    PyObject *backward = linked ? norm_of_sum_backward : norm_backward;
    if (n < 1 || n > 2) {
        PyErr_SetString(PyExc_TypeError, "expected the gradients of y and of the sum");
        return NULL;
    }
    PyObject *dy = grads[0], *dsum = n == 2 ? grads[1] : Py_None;
    PyObject *kept = kept_in(ctx), *found[GRADIENTS] = {NULL}, *result = NULL, *saved = NULL;
    PyObject *needed = kept == NULL ? NULL : tuple_of(ctx, s_needs_input_grad, linked ? 3 : 4);
    if (needed != NULL) saved = tuple_of(ctx, s_saved_tensors, SAVED);
    if (saved == NULL) goto done;
#define IS_NEEDED(i) (PyTuple_GET_ITEM(needed, i) == Py_True)
    int first = IS_NEEDED(0), second = !linked && IS_NEEDED(1), vectors = linked ? 1 : 2;
    int needs[GRADIENTS] = {first || second, IS_NEEDED(vectors), IS_NEEDED(vectors + 1)};
#undef IS_NEEDED
    int answer = find_gradients(kept, saved, dy, dsum, needs, found);
    if (answer == 0) {
        PyObject *arguments[] = {ctx, dy, dsum, saved};
        result = PyObject_Vectorcall(backward, arguments, 4, NULL);
    } else if (answer == 1 && linked) {
        result = gradients_of_inputs(found, GRADIENTS, 4);
    } else if (answer == 1) {
        PyObject *gradients[] = {cast(found[0], first, PyTuple_GET_ITEM(kept, X_DTYPE)),
                                 cast(found[0], second, PyTuple_GET_ITEM(kept, RESIDUAL_DTYPE)),
                                 Py_NewRef(found[1]), Py_NewRef(found[2])};
        result = gradients_of_inputs(gradients, 4, 7);
        drop(found, GRADIENTS);
    }
done:
    Py_XDECREF(kept);
    Py_XDECREF(needed);
    Py_XDECREF(saved);
    return result;
}

static PyObject *apply_norm(PyObject *ctx, PyObject *const *grads, Py_ssize_t n) {
    return apply_backward(ctx, grads, n, 0);
}

static PyObject *apply_linked_norm(PyObject *ctx, PyObject *const *grads, Py_ssize_t n) {
    return apply_backward(ctx, grads, n, 1);
}

// `SumFunction.backward`.
static PyObject *apply_sum_node(PyObject *ctx, PyObject *const *grads, Py_ssize_t n) {
    if (n != 1) {
        PyErr_SetString(PyExc_TypeError, "expected the gradient of the sum");
        return NULL;
    }
    PyObject *kept = kept_in(ctx), *result = NULL;
    PyObject *needed = kept == NULL ? NULL : tuple_of(ctx, s_needs_input_grad, 2);
    if (needed != NULL) {
        PyObject *gradients[2];
        for (int i = 0; i < 2; i++)
            gradients[i] = cast(grads[0], PyTuple_GET_ITEM(needed, i) == Py_True,
                                PyTuple_GET_ITEM(kept, X_DTYPE + i));
        result = gradients_of_inputs(gradients, 2, 7);
    }
    Py_XDECREF(kept);
    Py_XDECREF(needed);
    return result;
}

#define FASTCALL(name, function)                                                               \
    {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef function_methods[][2] = {
    {FASTCALL("forward", forward_norm), FASTCALL("apply", apply_norm)},
    {FASTCALL("forward", forward_sum), FASTCALL("apply", apply_sum_node)},
    {FASTCALL("forward", forward_norm_of_sum), FASTCALL("apply", apply_linked_norm)},
};

// Puts the C into the Functions and their nodes.
static int take_over_functions(void) {
    PyObject *const functions[] = {norm_function, sum_function, norm_of_sum};
    for (int i = 0; i < 3; i++) {
        PyObject *node = PyObject_GetAttr(functions[i], s__backward_cls);
        if (node == NULL) return -1;
        PyObject *forward = PyCFunction_New(&function_methods[i][0], NULL);
        PyObject *apply = PyDescr_NewMethod((PyTypeObject *)node, &function_methods[i][1]);
        int answer = forward == NULL || apply == NULL ? -1 : 0;
        if (answer == 0) answer = PyObject_SetAttr(functions[i], s_forward, forward);
        if (answer == 0) answer = PyObject_SetAttr(node, s_apply, apply);
        Py_DECREF(node);
        Py_XDECREF(forward);
        Py_XDECREF(apply);
        if (answer < 0) return -1;
    }
    return 0;
}

// --- modules ------------------------------------------------------------------------------------

// Where the attributes of Python's objects with __slots__ lie.
#define SLOTS(X)                                                                               \
    X(stream, _base) X(stream, _after) X(stream, _call) X(stream, _key) X(stream, _grad)       \
    X(stream, _delta) X(stream, _delta_first) X(stream, _versions) X(stream, _reshaped)        \
    X(call, state) X(call, watched) X(call, pending) X(block, writes) X(block, argument_keys)  \
    X(block, wraps_norms) X(block, outer) X(block, obstacle) X(block, learned)                 \
    X(block, handed) X(block, link) X(block, misses) X(block, min_elements) X(block, small)    \
    X(block, members) X(block, calls) X(block, inside) X(block, across) X(handed, tensor)      \
    X(handed, version) X(handed, y) X(handed, state) X(handed, norm_state) X(handed, spec)     \
    X(handed, eps) X(handed, weight) X(handed, weight_version) X(handed, bias)                 \
    X(handed, bias_version) X(handed, grad) X(handed, autocast) X(handed, after)               \
    X(ready, call) X(ready, add_call) X(ready, eps) X(ready, eps_name) X(ready, weight)        \
    X(ready, bias) X(spec, eps) X(spec, weight) X(spec, bias)
#define DECLARE_OFFSET(kind, name) static Py_ssize_t offset_##kind##_##name;
SLOTS(DECLARE_OFFSET)
#define AT(kind, object, name) (*(PyObject **)((char *)(object) + offset_##kind##_##name))
#define PUT(kind, object, name, value) Py_XSETREF(AT(kind, object, name), value)

static int find_slot(PyObject *type, const char *name, Py_ssize_t *offset) {
    PyObject *member = PyObject_GetAttrString(type, name);
    if (member == NULL) return -1;
    if (!Py_IS_TYPE(member, &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a slot", name);
        Py_DECREF(member);
        return -1;
    }
    *offset = ((PyMemberDescrObject *)member)->d_member->offset;
    Py_DECREF(member);
    return 0;
}

static int find_slots(void) {
    PyObject *stream = stream_type, *call = call_type, *block = block_type, *handed = handed_type;
    PyObject *ready = ready_type, *spec = spec_type;
#define FIND(kind, name)                                                                       \
    if (find_slot(kind, #name, &offset_##kind##_##name) < 0) return -1;
    SLOTS(FIND)
    return 0;
}

// Whether a dictionary of this name in another has anything in it, or is not there.
static int has_any(PyObject *dict, PyObject *name) {
    PyObject *found = PyDict_GetItemWithError(dict, name);
    if (found == NULL) return PyErr_Occurred() ? -1 : 1;
    return PyObject_IsTrue(found);
}

// torch's _has_any_global_hook.
static int any_global_hook(void) {
    PyObject *const kinds[] = {
        s__global_backward_pre_hooks, s__global_backward_hooks, s__global_forward_pre_hooks,
        s__global_forward_hooks, s__global_forward_hooks_always_called,
        s__global_forward_hooks_with_kwargs};
    int answer = global_hooks == NULL;
    for (size_t i = 0; answer == 0 && i < sizeof kinds / sizeof *kinds; i++)
        answer = has_any(global_hooks, kinds[i]);
    return answer;
}

// Whether calling the module with this __dict__ is more than running its class's forward, be it for
// a global hook.
static int is_hooked(PyObject *state) {
    PyObject *const hooks[] = {s__forward_pre_hooks, s__forward_hooks, s__backward_hooks,
                               s__backward_pre_hooks};
    int answer = 0;
    for (size_t i = 0; answer == 0 && i < sizeof hooks / sizeof *hooks; i++)
        answer = has_any(state, hooks[i]);
    if (answer == 0) answer = PyDict_Contains(state, s_forward);
    if (answer != 0) return answer;
    PyObject *compiled = PyDict_GetItemWithError(state, s__compiled_call_impl);
    if (compiled == NULL && PyErr_Occurred()) return -1;
    if (compiled != NULL && compiled != Py_None) return 1;
    return any_global_hook();
}

// What a dictionary has by a name from a slot, which may be empty. A borrowed reference; NULL without
// an exception where it has none.
static PyObject *named(PyObject *dict, PyObject *name) {
    return name == NULL ? NULL : PyDict_GetItemWithError(dict, name);
}

// The same of a parameter, None where the name is None.
static PyObject *parameter(PyObject *parameters, PyObject *name) {
    return name == Py_None ? Py_None : named(parameters, name);
}

// (y, summed) of a module with this __dict__, where a call like it was in order before; or None.
static PyObject *call_ready(PyObject *state, PyObject *x, PyObject *residual) {
    PyObject *ready = PyDict_GetItemWithError(state, s__fusedops_ready), *result = NULL;
    if (ready == NULL && PyErr_Occurred()) return NULL;
    if (ready == NULL || !Py_IS_TYPE(ready, (PyTypeObject *)ready_type)) Py_RETURN_NONE;
    PyObject *call = residual == Py_None ? AT(ready, ready, call) : AT(ready, ready, add_call);
    PyObject *parameters = PyDict_GetItemWithError(state, s__parameters);
    PyObject *eps = named(state, AT(ready, ready, eps_name));
    if (call != NULL && call != Py_None && eps != NULL && eps == AT(ready, ready, eps) &&
        parameters != NULL && PyDict_Check(parameters)) {
        PyObject *weight = parameter(parameters, AT(ready, ready, weight));
        PyObject *bias = weight == NULL ? NULL : parameter(parameters, AT(ready, ready, bias));
        if (bias != NULL) {
            PyObject *arguments[] = {x, residual, Py_NewRef(weight), Py_NewRef(bias)};
            Py_INCREF(call);
            result = PyObject_Vectorcall(call, arguments, INPUTS, NULL);
            Py_DECREF(call);
            Py_DECREF(weight);
            Py_DECREF(bias);
        }
    }
    return result == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : result;
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
    PyObject *state = state_of(module);
    if (state == NULL) return NULL;
    int answer = is_hooked(state);
    Py_DECREF(state);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

// --- streams -----------------------------------------------------------------------------------
//
// A block's forward with a stream in it, as integrations/stream.py has it, for what happens in
// nearly every call: nobody watches, no hooks, one stream, adds that a ready norm reads, and a sum
// handed over to the next norm. Where anything is otherwise nothing has been done yet, and Python
// does it all.

static PyObject *new_object(PyObject *type) {
    return ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
}

static PyObject *new_stream(PyObject *base, PyObject *call, PyObject *key, PyObject *grad) {
    PyObject *stream = new_object(stream_type);
    if (stream == NULL) return NULL;
    PUT(stream, stream, _base, Py_NewRef(base));
    PUT(stream, stream, _after, Py_NewRef(Py_None));
    PUT(stream, stream, _call, Py_NewRef(call));
    PUT(stream, stream, _key, Py_NewRef(key));
    PUT(stream, stream, _grad, Py_NewRef(grad));
    PUT(stream, stream, _delta, Py_NewRef(Py_None));
    PUT(stream, stream, _reshaped, Py_NewRef(Py_None));
    return stream;
}

static int add_one(PyObject **number) {
    PyObject *one = PyLong_FromLong(1);
    PyObject *sum = one == NULL ? NULL : PyNumber_Add(*number, one);
    Py_XDECREF(one);
    if (sum == NULL) return -1;
    Py_SETREF(*number, sum);
    return 1;
}

static int same(PyObject *a, PyObject *b, PyObject *name) {
    PyObject *left = PyObject_GetAttr(a, name);
    PyObject *right = left == NULL ? NULL : PyObject_GetAttr(b, name);
    int answer = right == NULL ? -1 : PyObject_RichCompareBool(left, right, Py_EQ);
    Py_XDECREF(left);
    Py_XDECREF(right);
    return answer;
}

static PyObject *version_of(PyObject *tensor) {
    return tensor == Py_None ? Py_NewRef(tensor) : PyObject_GetAttr(tensor, s__version);
}

static int has_version(PyObject *tensor, PyObject *version) {
    PyObject *now = PyObject_GetAttr(tensor, s__version);
    if (now == NULL) return -1;
    int answer = PyObject_RichCompareBool(now, version, Py_EQ);
    Py_DECREF(now);
    return answer;
}

// A stream that stands for stream + other, NULL without an exception where Python must see to it.
static PyObject *put_off(PyObject *stream, PyObject *other, PyObject *other_first) {
    PyObject *call = AT(stream, stream, _call), *base = AT(stream, stream, _after);
    if (base == Py_None) base = AT(stream, stream, _base);
    if (AT(call, call, pending) != Py_None || AT(call, call, state) == closed ||
        AT(stream, stream, _reshaped) != Py_None || !Py_IS_TYPE(other, (PyTypeObject *)tensor_type))
        return NULL;
    Layout layouts[2];
    if (layout_of(base, &layouts[0]) < 0 || layout_of(other, &layouts[1]) < 0) {
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear();  // sparse or nested
        return NULL;
    }
    if (!same_shape(&layouts[0], &layouts[1]) || same(base, other, s_dtype) != 1) return NULL;
    PyObject *version = PyObject_GetAttr(base, s__version), *result = NULL;
    PyObject *other_version = version == NULL ? NULL : PyObject_GetAttr(other, s__version);
    if (other_version == NULL) {
        Py_XDECREF(version);
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear();  // inference tensors
        return NULL;
    }
    PyObject *versions = PyTuple_Pack(2, version, other_version);
    PyObject *grad = call0(is_grad_enabled);
    Py_DECREF(version);
    Py_DECREF(other_version);
    if (versions != NULL && grad != NULL)
        result = new_stream(base, call, AT(stream, stream, _key), grad);
    if (result != NULL) {
        PUT(stream, result, _delta, Py_NewRef(other));
        PUT(stream, result, _delta_first, Py_NewRef(other_first));
        PUT(stream, result, _versions, Py_NewRef(versions));
        PUT(call, call, pending, Py_NewRef(result));
    }
    Py_XDECREF(versions);
    Py_XDECREF(grad);
    return result;
}

static PyObject *add(PyObject *stream, PyObject *other, PyObject *other_first) {
    PyObject *result = put_off(stream, other, other_first);
    if (result != NULL || PyErr_Occurred()) return result;
    PyObject *arguments[] = {stream, other, other_first};
    return PyObject_Vectorcall(add_in_python, arguments, 3, NULL);
}

static PyObject *stream_add(PyObject *stream, PyObject *other) {
    return add(stream, other, Py_False);
}

static PyObject *stream_radd(PyObject *stream, PyObject *other) {
    return add(stream, other, Py_True);
}

// `ResidualStream.__torch_function__`: (func, types, args=(), kwargs=None).
static PyObject *torch_function(PyObject *unused, PyObject *const *given, Py_ssize_t nargs) {
    if (nargs >= 3 && (given[0] == method_add || given[0] == function_add) &&
        PyTuple_Check(given[2]) && PyTuple_GET_SIZE(given[2]) == 2 &&
        (nargs == 3 || given[3] == Py_None ||
         (PyDict_Check(given[3]) && PyDict_GET_SIZE(given[3]) == 0))) {
        PyObject *first = PyTuple_GET_ITEM(given[2], 0), *second = PyTuple_GET_ITEM(given[2], 1);
        if (Py_IS_TYPE(first, (PyTypeObject *)stream_type)) return add(first, second, Py_False);
        if (Py_IS_TYPE(second, (PyTypeObject *)stream_type)) return add(second, first, Py_True);
    }
    return PyObject_Vectorcall(torch_function_in_python, given, nargs, NULL);
}

static PyMethodDef stream_methods[] = {
    {"__add__", stream_add, METH_O, NULL},
    {"__radd__", stream_radd, METH_O, NULL},
    {"__torch_function__", (PyCFunction)(void (*)(void))torch_function, METH_FASTCALL, NULL},
};

// Puts the C in the place of the stream's methods of these names; the last takes no stream first.
static int take_over_methods(void) {
    for (int i = 0; i < 3; i++) {
        PyMethodDef *method = &stream_methods[i];
        PyObject *function = i < 2 ? PyDescr_NewMethod((PyTypeObject *)stream_type, method)
                                   : PyCFunction_New(method, NULL);
        if (function == NULL) return -1;
        int answer = PyObject_SetAttrString(stream_type, method->ml_name, function);
        Py_DECREF(function);
        if (answer < 0) return -1;
    }
    return 0;
}

// Whether the call of a norm that was foreseen in `handed` is this one.
static int fits(PyObject *handed, PyObject *norm_state, PyObject *x) {
    if (AT(handed, handed, norm_state) != norm_state) return 0;
    if (AT(handed, handed, autocast) != Py_None) return 0;
    int answer = is_object(call0(AT(handed, handed, tensor)), x);
    if (answer == 1) answer = has_version(x, AT(handed, handed, version));
    if (answer == 1) answer = is_object(call0(is_grad_enabled), AT(handed, handed, grad));
    if (answer == 1) answer = is_object(call0(any_autocast), Py_False);
    if (answer == 1 && AT(handed, handed, grad) == Py_True)
        answer = is_object(call0(saves_are_watched), Py_False);
    if (answer != 1) return answer;

    PyObject *spec = AT(handed, handed, spec);
    PyObject *parameters = PyDict_GetItemWithError(norm_state, s__parameters);
    if (parameters == NULL || !PyDict_Check(parameters)) return PyErr_Occurred() ? -1 : 0;
    if (PyDict_GetItemWithError(norm_state, s__fusedops_norm) != spec) return 0;
    if (!Py_IS_TYPE(spec, (PyTypeObject *)spec_type)) return 0;
    PyObject *eps = named(norm_state, AT(spec, spec, eps));
    if (eps == NULL || eps != AT(handed, handed, eps)) return PyErr_Occurred() ? -1 : 0;
    PyObject *weight = parameter(parameters, AT(spec, spec, weight));
    PyObject *bias = weight == NULL ? NULL : parameter(parameters, AT(spec, spec, bias));
    if (bias == NULL) return PyErr_Occurred() ? -1 : 0;
    if (weight != AT(handed, handed, weight) || bias != AT(handed, handed, bias)) return 0;
    if (weight != Py_None) answer = has_version(weight, AT(handed, handed, weight_version));
    if (answer == 1 && bias != Py_None)
        answer = has_version(bias, AT(handed, handed, bias_version));
    return answer;
}

// The result kept for this call of a norm, or that of a ready call; or None. A result that was kept
// may come with a tensor for the stream's `_after`.
static PyObject *call_plain(PyObject *norm_state, PyObject *x, PyObject **after) {
    PyObject *held = PyObject_GetAttr(slot, s_held), *y = NULL;
    if (held == NULL) return NULL;
    if (held == Py_None) {
        Py_DECREF(held);
        y = call_ready(norm_state, x, Py_None);
        if (y != NULL && PyTuple_Check(y)) Py_SETREF(y, Py_NewRef(PyTuple_GET_ITEM(y, 0)));
        return y;
    }
    int answer = handed_type != NULL && Py_IS_TYPE(held, (PyTypeObject *)handed_type)
                     ? fits(held, norm_state, x) : 0;
    if (answer == 1 && PyObject_SetAttr(slot, s_held, Py_None) < 0) answer = -1;
    if (answer == 1) {
        PUT(block, AT(handed, held, state), misses, PyLong_FromLong(0));
        y = Py_NewRef(AT(handed, held, y));
        if (after != NULL) *after = Py_NewRef(AT(handed, held, after));
    }
    Py_DECREF(held);
    return answer == 0 ? Py_NewRef(Py_None) : y;
}

// The norm of a pending sum, which the stream then holds; or None.
static PyObject *fuse(PyObject *norm_state, PyObject *stream) {
    PyObject *y = NULL, *done = NULL;
    int answer = is_object(call0(is_grad_enabled), AT(stream, stream, _grad));
    if (answer != 1) return answer < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *versions = Py_NewRef(AT(stream, stream, _versions));
    PyObject *base = Py_NewRef(AT(stream, stream, _base));
    PyObject *delta = Py_NewRef(AT(stream, stream, _delta));
    if (versions != Py_None) {
        answer = has_version(base, PyTuple_GET_ITEM(versions, 0));
        if (answer == 1) answer = has_version(delta, PyTuple_GET_ITEM(versions, 1));
    }
    if (answer == 1) done = call_ready(norm_state, delta, base);
    Py_DECREF(versions);
    Py_DECREF(base);
    Py_DECREF(delta);
    if (answer < 0 || (answer == 1 && done == NULL)) return NULL;
    if (answer == 0 || done == Py_None) {
        Py_XDECREF(done);
        Py_RETURN_NONE;
    }
    PyObject *held = PyObject_GetAttr(slot, s_held), *dropped = NULL;
    if (held != NULL) dropped = held == Py_None ? Py_NewRef(Py_None) : call0(drop_held);
    Py_XDECREF(held);
    if (dropped != NULL) {
        Py_DECREF(dropped);
        y = Py_NewRef(PyTuple_GET_ITEM(done, 0));
        PUT(stream, stream, _base, Py_NewRef(PyTuple_GET_ITEM(done, 1)));
        PUT(stream, stream, _after,
            Py_NewRef(PyTuple_GET_SIZE(done) > 2 ? PyTuple_GET_ITEM(done, 2) : Py_None));
        PUT(stream, stream, _delta, Py_NewRef(Py_None));
        PUT(call, AT(stream, stream, _call), pending, Py_NewRef(Py_None));
    }
    Py_DECREF(done);
    return y;
}

// The norm of a stream, or None.
static PyObject *call_with_stream(PyObject *norm_state, PyObject *stream) {
    PyObject *call = AT(stream, stream, _call), *state = AT(call, call, state), *y;
    if (AT(call, call, watched) != Py_False ||
        AT(block, state, wraps_norms) != Py_False || AT(stream, stream, _reshaped) != Py_None)
        Py_RETURN_NONE;
    if (AT(stream, stream, _delta) == Py_None) {
        PyObject *base = Py_NewRef(AT(stream, stream, _base)), *after = NULL;
        y = call_plain(norm_state, base, &after);
        if (after != NULL) PUT(stream, stream, _after, after);
        Py_DECREF(base);
        return y;
    }
    Py_INCREF(state);
    y = fuse(norm_state, stream);
    if (y != NULL && y != Py_None && add_one(&AT(block, state, inside)) < 0) Py_CLEAR(y);
    Py_DECREF(state);
    return y;
}

// `_HandOver` of the stream's sum, whose norm is y.
static PyObject *new_handed(PyObject *stream, PyObject *y, PyObject *norm_state) {
    PyObject *handed = new_object(handed_type), *tensor = AT(stream, stream, _base), *found;
    if (handed == NULL) return NULL;
#define GIVE(name, value)                                                                      \
    found = value;                                                                             \
    if (found == NULL) goto failed;                                                            \
    PUT(handed, handed, name, found)
    GIVE(tensor, PyWeakref_NewRef(tensor, forget));
    GIVE(version, PyObject_GetAttr(tensor, s__version));
    GIVE(y, Py_NewRef(y));
    GIVE(after, Py_NewRef(AT(stream, stream, _after)));
    GIVE(state, Py_NewRef(AT(call, AT(stream, stream, _call), state)));
    GIVE(norm_state, Py_NewRef(norm_state));
    GIVE(grad, Py_NewRef(AT(stream, stream, _grad)));
    GIVE(autocast, Py_NewRef(Py_None));
    GIVE(spec, Py_XNewRef(PyDict_GetItemWithError(norm_state, s__fusedops_norm)));
    PyObject *spec = AT(handed, handed, spec);
    if (!Py_IS_TYPE(spec, (PyTypeObject *)spec_type)) goto failed;
    GIVE(eps, Py_XNewRef(named(norm_state, AT(spec, spec, eps))));
    PyObject *parameters = PyDict_GetItemWithError(norm_state, s__parameters);
    if (parameters == NULL || !PyDict_Check(parameters)) goto failed;
    GIVE(weight, Py_XNewRef(parameter(parameters, AT(spec, spec, weight))));
    GIVE(bias, Py_XNewRef(parameter(parameters, AT(spec, spec, bias))));
    GIVE(weight_version, version_of(AT(handed, handed, weight)));
    GIVE(bias_version, version_of(AT(handed, handed, bias)));
    return handed;
failed:
    Py_DECREF(handed);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the norm has changed meanwhile");
    return NULL;
}

// The tensor that leaves the block for a pending stream, with the next norm done; or None.
static PyObject *hand_over(PyObject *block_dict, PyObject *stream) {
    PyObject *state = AT(call, AT(stream, stream, _call), state);
    if (AT(stream, stream, _delta) == Py_None || AT(stream, stream, _reshaped) != Py_None ||
        AT(block, state, link) == Py_None || PyObject_IsTrue(AT(block, state, outer)))
        Py_RETURN_NONE;
    int answer = has_any(block_dict, s__forward_hooks);
    if (answer == 0) answer = has_any(block_dict, s__backward_hooks);
    if (answer == 0) answer = has_any(block_dict, s__backward_pre_hooks);
    if (answer == 0) answer = truth(call0(is_inference));
    if (answer == 0 && AT(stream, stream, _grad) == Py_True)
        answer = truth(call0(saves_are_watched));
    if (answer == 0) answer = truth(call0(any_autocast));
    if (answer != 0) return answer < 0 ? NULL : Py_NewRef(Py_None);

    PyObject *link = Py_NewRef(AT(block, state, link));  // another thread may give it up
    PyObject *norm = link == Py_None ? Py_NewRef(link) : call0(link);
    Py_DECREF(link);
    if (norm == NULL || norm == Py_None) return norm;
    PyObject *norm_state = state_of(norm), *y = NULL, *handed = NULL, *result = NULL;
    Py_DECREF(norm);
    if (norm_state == NULL) return NULL;
    answer = is_hooked(norm_state);
    if (answer == 0) y = fuse(norm_state, stream);
    if (answer == 1 || y == Py_None) {
        result = Py_NewRef(Py_None);
    } else if (y != NULL) {
        int failed = add_one(&AT(block, state, across)) < 0;
        if (!failed) handed = new_handed(stream, y, norm_state);
        if (handed != NULL) {
            failed = PyObject_SetAttr(slot, s_held, handed) < 0;
        } else if (!failed) {
            failed = !PyErr_ExceptionMatches(PyExc_RuntimeError);
            if (!failed) {  // a weight that counts no versions, say: not again
                PyErr_Clear();
                PyObject *given_up = call1(give_up, state);
                failed = given_up == NULL;
                Py_XDECREF(given_up);
            }
        }
        if (!failed) result = Py_NewRef(AT(stream, stream, _base));
    }
    Py_DECREF(norm_state);
    Py_XDECREF(y);
    Py_XDECREF(handed);
    return result;
}

// What the block returns, from what its forward returned; in simple cases, else Python is asked.
static PyObject *leave_in_c(PyObject *block, PyObject *call, PyObject *output) {
    PyObject *first = output, *left = NULL;
    Py_ssize_t n = 0;
    if (PyTuple_CheckExact(output) && (n = PyTuple_GET_SIZE(output)) > 0)
        first = PyTuple_GET_ITEM(output, 0);
    int simple = Py_IS_TYPE(first, (PyTypeObject *)stream_type) &&
                 AT(call, call, pending) == first && AT(stream, first, _call) == call;
    for (Py_ssize_t i = 1; simple && i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(output, i);
        simple = item == Py_None || Py_IS_TYPE(item, (PyTypeObject *)tensor_type);
    }
    if (simple) {
        PyObject *block_dict = state_of(block);
        left = block_dict == NULL ? NULL : hand_over(block_dict, first);
        Py_XDECREF(block_dict);
        if (left == NULL) return NULL;
        if (left != Py_None && n == 0) return left;
        if (left != Py_None) {
            PyObject *outputs = PyTuple_New(n);
            for (Py_ssize_t i = 1; outputs != NULL && i < n; i++)
                PyTuple_SET_ITEM(outputs, i, Py_NewRef(PyTuple_GET_ITEM(output, i)));
            if (outputs == NULL)
                Py_DECREF(left);
            else
                PyTuple_SET_ITEM(outputs, 0, left);
            return outputs;
        }
        Py_DECREF(left);
    }
    PyObject *arguments[] = {block, call, output};
    return PyObject_Vectorcall(leave_block, arguments, 3, NULL);
}

// Whether the stream's cost on the CPU is not worth it: see MIN_ELEMENTS in integrations/stream.py.
static int is_small(PyObject *state, PyObject *x) {
    long long least = PyLong_AsLongLong(AT(block, state, min_elements));
    Layout layout;
    if (least <= 0 || !Py_IS_TYPE(x, (PyTypeObject *)tensor_type)) return 0;
    if (layout_of(x, &layout) < 0) {
        int unknown = PyErr_ExceptionMatches(PyExc_RuntimeError);  // sparse or nested
        if (unknown) PyErr_Clear();
        return unknown ? 0 : -1;
    }
    if (count(&layout) >= least) return 0;
    int answer = truth(call1(is_cuda, x));
    if (answer == 1) answer = is_object(call0(is_capturing), Py_False);
    return answer;
}

// forward(block, *args, **kwargs), x of the arguments being replaced.
static PyObject *call_forward(PyObject *forward, PyObject *block, PyObject *args, PyObject *kwargs,
                              Py_ssize_t at, PyObject *x) {
    Py_ssize_t n = PyTuple_GET_SIZE(args);
    PyObject *arguments = PyTuple_New(n + 1);
    if (arguments == NULL) return NULL;
    PyTuple_SET_ITEM(arguments, 0, Py_NewRef(block));
    for (Py_ssize_t i = 0; i < n; i++)
        PyTuple_SET_ITEM(arguments, i + 1, Py_NewRef(i == at ? x : PyTuple_GET_ITEM(args, i)));
    PyObject *output = PyObject_Call(forward, arguments, kwargs);
    Py_DECREF(arguments);
    return output;
}

// Whether the block may be run with a stream for x, and no more than that is to be looked at.
static int may_stream(PyObject *block, PyObject *state, PyObject *x) {
    if (!Py_IS_TYPE(x, (PyTypeObject *)tensor_type) || AT(block, state, writes) != Py_False)
        return 0;
    PyObject *dtype = PyObject_GetAttr(x, s_dtype);
    if (dtype == NULL) return -1;
    int answer = PySet_Contains(floats, dtype);
    Py_DECREF(dtype);
    if (answer == 1) answer = truth(call1(is_cuda, x));
    if (answer != 1) return answer;
    answer = is_dual();
    if (answer == 0) answer = truth(call0(dispatch_modes));
    if (answer == 0) answer = is_in_mode();
    if (answer == 0) answer = any_global_hook();
    if (answer != 0) return answer < 0 ? -1 : 0;
    answer = is_object(call0(transforms), Py_None);
    if (answer == 1) answer = is_object(call0(jit_trace), Py_None);
    if (answer != 1) return answer;

    PyObject *held = PyObject_GetAttr(slot, s_held);
    if (held == NULL) return -1;
    Py_DECREF(held);
    if (held == Py_None) return 1;
    PyObject *block_dict = state_of(block);
    if (block_dict == NULL) return -1;
    answer = has_any(block_dict, s__forward_pre_hooks);
    Py_DECREF(block_dict);
    if (answer == 0) answer = PyObject_IsTrue(AT(block, state, outer));
    return answer < 0 ? -1 : !answer;
}

static PyObject *new_call(PyObject *state) {
    PyObject *call = new_object(call_type);
    if (call == NULL) return NULL;
    PUT(call, call, state, Py_NewRef(state));
    PUT(call, call, watched, Py_NewRef(Py_False));
    PUT(call, call, pending, Py_NewRef(Py_None));
    return call;
}

// Whether a module's children, as they stand in its dictionary, are those of ``known``.
static int has_members(PyObject *module_dict, PyObject *known) {
    PyObject *children = PyDict_GetItemWithError(module_dict, s__modules), *name, *child;
    if (children == NULL && PyErr_Occurred()) return -1;
    if (children == NULL || !PyDict_Check(children) || !PyTuple_Check(known) ||
        PyDict_GET_SIZE(children) != PyTuple_GET_SIZE(known))
        return 0;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; PyDict_Next(children, &at, &name, &child); i++) {
        PyObject *before = PyTuple_GET_ITEM(known, i);
        if (child == Py_None && before == Py_None) continue;
        if (child == Py_None || before == Py_None) return 0;
        PyObject *reference = PyWeakref_NewRef(child, NULL);  // the same one each time
        if (reference == NULL) return -1;
        Py_DECREF(reference);
        if (reference != before) return 0;
    }
    return 1;
}

// `holds_same`, of the block with this dictionary.
static int holds_same(PyObject *block_dict, PyObject *state) {
    PyObject *members = AT(block, state, members);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(members); i++) {
        PyObject *entry = PyTuple_GET_ITEM(members, i), *holder = PyTuple_GET_ITEM(entry, 0);
        PyObject *known = PyTuple_GET_ITEM(entry, 1);
        int answer;
        if (holder == Py_None) {
            answer = has_members(block_dict, known);
        } else {
            PyObject *module = call0(holder);  // a weak reference
            PyObject *module_dict = module == NULL || module == Py_None ? NULL : state_of(module);
            answer = module_dict != NULL ? has_members(module_dict, known)
                                         : PyErr_Occurred() ? -1 : 0;
            Py_XDECREF(module_dict);
            Py_XDECREF(module);
        }
        if (answer != 1) return answer;
    }
    return 1;
}

// The `BlockState` of a block of which all is known but whether it holds the same modules, borrowed;
// NULL without an exception: none.
static PyObject *known_state(PyObject *block_dict) {
    PyObject *state = PyDict_GetItemWithError(block_dict, s__fusedops_block);
    PyObject *training = state == NULL ? NULL : PyDict_GetItemWithError(block_dict, s_training);
    if (training == NULL || !Py_IS_TYPE(state, (PyTypeObject *)block_type) ||
        AT(block, state, obstacle) != Py_None || PyList_GET_SIZE(AT(block, state, handed)) > 0)
        return NULL;
    return PySet_Contains(AT(block, state, learned), training) == 1 ? state : NULL;
}

// (forward, block, args, kwargs) -> the block's output, or NotImplemented.
static PyObject *run_block(PyObject *unused, PyObject *const *given, Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(given[2]) || !PyDict_Check(given[3])) {
        PyErr_SetString(PyExc_TypeError, "expected a forward, a block, args and kwargs");
        return NULL;
    }
    PyObject *forward = given[0], *block = given[1], *args = given[2];
    PyObject *block_dict = block_type == NULL ? NULL : state_of(block);
    PyObject *state = block_dict == NULL ? NULL : known_state(block_dict);
    Py_XINCREF(state);  // the block may be unpatched while it runs
    if (state == NULL) {
        Py_XDECREF(block_dict);
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    }
    PyObject *keys = AT(block, state, argument_keys), *key = NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(args), at = -1;
    if (PyTuple_GET_SIZE(keys) == 1 && PyLong_Check(PyTuple_GET_ITEM(keys, 0))) {
        key = Py_NewRef(PyTuple_GET_ITEM(keys, 0));
        at = PyLong_AsSsize_t(key);
    }
    PyObject *x = at >= 0 && at < n ? PyTuple_GET_ITEM(args, at) : NULL;
    int small = x == NULL ? 0 : is_small(state, x), answer = small;
    if (small == 0 && x != NULL) answer = holds_same(block_dict, state);
    Py_DECREF(block_dict);
    if (small == 1) {
        PyObject *output = add_one(&AT(block, state, small)) < 0
                               ? NULL : call_forward(forward, block, args, given[3], at, x);
        Py_DECREF(state);
        Py_DECREF(key);
        return output;
    }
    if (answer == 1) answer = may_stream(block, state, x);
    if (answer != 1) {
        Py_DECREF(state);
        Py_XDECREF(key);
        return answer < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }

    PyObject *call = new_call(state), *grad = call0(is_grad_enabled);
    PyObject *stream = NULL, *output = NULL, *result = NULL;
    if (call != NULL && grad != NULL) stream = new_stream(x, call, key, grad);
    if (stream != NULL) {
        output = call_forward(forward, block, args, given[3], at, stream);
        if (output != NULL) result = leave_in_c(block, call, output);
        PUT(call, call, state, Py_NewRef(closed));
        if (result != NULL && add_one(&AT(block, state, calls)) < 0) Py_CLEAR(result);
        if (result == NULL) {
            PyObject *type, *value, *traceback;
            PyErr_Fetch(&type, &value, &traceback);
            if (PyObject_SetAttr(slot, s_held, Py_None) < 0) PyErr_Clear();
            PyErr_Restore(type, value, traceback);
        }
    }
    Py_XDECREF(stream);
    Py_XDECREF(output);
    if (result != NULL && Py_REFCNT(call) > 1) {  // streams live on
        PyObject *arguments[] = {state, call};
        PyObject *taken = PyObject_Vectorcall(take_back, arguments, 2, NULL);
        if (taken == NULL) Py_CLEAR(result);
        Py_XDECREF(taken);
    }
    Py_DECREF(state);
    Py_DECREF(key);
    Py_XDECREF(call);
    Py_XDECREF(grad);
    return result;
}

// (norm, class, args, kwargs) -> y, or None. Tensors are for norms of just that class.
static PyObject *call_module(PyObject *unused, PyObject *const *given, Py_ssize_t nargs) {
    if (nargs != 4 || !PyTuple_Check(given[2]) || !PyDict_Check(given[3])) {
        PyErr_SetString(PyExc_TypeError, "expected a module, its class, args and kwargs");
        return NULL;
    }
    PyObject *module = given[0];
    if (slot == NULL || PyTuple_GET_SIZE(given[2]) != 1 || PyDict_GET_SIZE(given[3]) > 0)
        Py_RETURN_NONE;
    PyObject *x = PyTuple_GET_ITEM(given[2], 0), *result = NULL;
    int is_stream = Py_IS_TYPE(x, (PyTypeObject *)stream_type);
    if (!is_stream && !(Py_IS_TYPE(x, (PyTypeObject *)tensor_type) &&
                        Py_IS_TYPE(module, (PyTypeObject *)given[1])))
        Py_RETURN_NONE;
    PyObject *state = state_of(module);
    if (state == NULL) return NULL;
    int answer = is_hooked(state);
    if (answer == 1) result = Py_NewRef(Py_None);
    if (answer == 0) result = is_stream ? call_with_stream(state, x)
                                              : call_plain(state, x, NULL);
    Py_DECREF(state);
    return result;
}

// --- the module --------------------------------------------------------------------------------

// Takes the objects of GLOBALS by name; some may come later than others.
static PyObject *configure(PyObject *unused, PyObject *args, PyObject *kwargs) {
#define NAME(name) #name,
#define ADDRESS(name) &name,
    static const char *const names[] = {GLOBALS(NAME)};
    PyObject **const addresses[] = {GLOBALS(ADDRESS)}, *example;
    for (size_t i = 0; kwargs != NULL && i < sizeof names / sizeof *names; i++) {
        PyObject *value = PyDict_GetItemString(kwargs, names[i]);
        if (value != NULL) Py_XSETREF(*addresses[i], Py_NewRef(value));
    }
    if (kwargs != NULL && (example = PyDict_GetItemString(kwargs, "example")) != NULL &&
        find_tensors(example) < 0)
        return NULL;
    if (kwargs != NULL && PyDict_GetItemString(kwargs, "stream_type") &&
        (find_slots() < 0 || take_over_methods() < 0))
        return NULL;
    if (kwargs != NULL && PyDict_GetItemString(kwargs, "norm_function") &&
        take_over_functions() < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch_backward", (PyCFunction)(void (*)(void))launch_backward, METH_FASTCALL, NULL},
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS, NULL},
    {"is_hooked", module_is_hooked, METH_O, NULL},
    {"ready_norm", (PyCFunction)(void (*)(void))ready_norm, METH_FASTCALL, NULL},
    {"call_module", (PyCFunction)(void (*)(void))call_module, METH_FASTCALL, NULL},
    {"run_block", (PyCFunction)(void (*)(void))run_block, METH_FASTCALL, NULL},
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
    int answer = PyModule_AddObjectRef(module, "Caller", (PyObject *)&CallerType);
#ifdef CUDA_VERSION
    if (answer == 0) answer = PyType_Ready(&LauncherType);
    if (answer == 0) answer = PyModule_AddObjectRef(module, "Launcher", (PyObject *)&LauncherType);
#endif
    if (answer < 0) Py_CLEAR(module);
    return module;
}
