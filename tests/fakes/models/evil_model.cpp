/// A compiled model that misbehaves as told, in the shape of an AOTInductor library: the C functions that LibTorch's
/// runner looks up (torch/csrc/inductor/aoti_runtime/interface.h), written by hand and linked to nothing.
///
/// EVIL_LOAD and EVIL_RUN say what creating and running it do:
///
///   ok              nothing
///   abort exit segv fpe stack_overflow   the process ends so; `segv` writes to an address that is not there
///   loop, spin      computes for ever; `deadlock` waits for a lock that it holds
///   ignore_sigterm  SIGTERM is ignored from now on, a thread takes no signal and never ends, and neither does the call
///   setsid_child    leaves a grandchild, in a session of its own and with every descriptor, that sleeps for ever
///   throw           fails, with a word on std::cerr
///   print100mb      prints that much
///   print1gib       writes that much to standard error, in lines with colours, zeros and bells
///
/// EVIL_RUN lets the warm-up pass: it acts on a positive first byte of the input alone.
/// Ok is the identity: one input, one output, the same tensor.

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <thread>

using Status = std::int32_t;
using Handle = void*;

#define EVIL_API extern "C" __attribute__((visibility("default")))

// Of LibTorch's stable C interface, resolved from the process.
EVIL_API Status aoti_torch_get_data_ptr(Handle tensor, void** data);
EVIL_API Status aoti_torch_get_numel(Handle tensor, std::int64_t* count);

// An event to wait for; from inside the function that it names, which is then in every backtrace.
static void announce(const char* what) { std::fprintf(stderr, "evil: %s\n", what); }

// Named in backtraces: they are exported for that alone.
EVIL_API void evil_spin() {
    announce("spin");
    for (std::atomic<unsigned> turns = 0;;) ++turns;
}
EVIL_API void evil_deadlock() {
    announce("deadlock");
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    pthread_mutex_lock(&mutex);
}
EVIL_API void evil_segv() {
    volatile int* volatile nowhere = nullptr;
    *nowhere = 1;
}
EVIL_API int evil_division(int by) {
    volatile int divisor = by;
    const int result = 1 / divisor;
    std::raise(SIGFPE);  // where the processor lets that pass
    return result;
}
EVIL_API int evil_recursion(int depth) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(depth);
    return depth < 0 ? 0 : evil_recursion(depth + 1) + frame[0];
}
EVIL_API void evil_ignore_sigterm() {
    std::signal(SIGTERM, SIG_IGN);
    announce("ignore_sigterm");
    std::thread{[] {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        for (;;) pause();
    }}.detach();
    for (;;) pause();
}
EVIL_API void evil_setsid_child() {
    const pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork() != 0) _exit(0);
        std::fprintf(stderr, "evil: pid %d is the grandchild\n", static_cast<int>(getpid()));
        for (;;) pause();
    }
    if (child > 0) waitpid(child, nullptr, 0);
}

namespace {

constexpr Status ok = 0;
constexpr Status failed = 1;

Status misbehave(const char* variable) {
    const char* const value = std::getenv(variable);
    const std::string_view what = value == nullptr ? "ok" : value;
    if (what == "abort") std::abort();
    if (what == "exit") std::exit(3);
    if (what == "segv") evil_segv();
    if (what == "fpe") (void)evil_division(0);
    if (what == "stack_overflow") (void)evil_recursion(1);
    if (what == "loop" || what == "spin") evil_spin();
    if (what == "deadlock") evil_deadlock();
    if (what == "ignore_sigterm") evil_ignore_sigterm();
    if (what == "setsid_child") evil_setsid_child();
    if (what == "throw") {
        std::cerr << "Error: the evil model throws\n";  // as generated code does, which lets no exception out
        return failed;
    }
    if (what == "print100mb") {
        const std::string line(999'999, 'x');
        for (int i = 0; i < 100; ++i) std::puts(line.c_str());
    }
    if (what == "print1gib") {
        std::string block;
        while (block.size() < (1u << 20) - 128)
            block += std::string("\x1b[31mred\0\a\r", 11) + std::string(100, 'x') + "\n";
        block.resize(1u << 20, '\n');
        for (int i = 0; i < 1024; ++i)
            for (std::size_t written = 0; written < block.size();) {
                const ssize_t count = write(2, block.data() + written, block.size() - written);
                if (count < 0) return failed;
                written += static_cast<std::size_t>(count);
            }
    }
    return ok;
}

bool is_provoked(Handle input) {
    void* data = nullptr;
    std::int64_t count = 0;
    if (aoti_torch_get_numel(input, &count) != ok || count == 0) return false;
    if (aoti_torch_get_data_ptr(input, &data) != ok) return false;
    return *static_cast<const float*>(data) > 0.0F;
}

int container;

}  // namespace

EVIL_API Status AOTInductorModelContainerCreateWithDevice(Handle* handle, std::size_t, const char*, const char*) {
    *handle = &container;
    return misbehave("EVIL_LOAD");
}
EVIL_API Status AOTInductorModelContainerDelete(Handle) { return ok; }
EVIL_API Status AOTInductorModelContainerGetNumInputs(Handle, std::size_t* count) {
    *count = 1;
    return ok;
}
EVIL_API Status AOTInductorModelContainerGetNumOutputs(Handle, std::size_t* count) {
    *count = 1;
    return ok;
}
/// Input handles are stolen, output handles given: the identity hands one on.
EVIL_API Status AOTInductorModelContainerRun(Handle, Handle* inputs, std::size_t, Handle* outputs, std::size_t, Handle,
                                             Handle) {
    if (is_provoked(inputs[0]))
        if (const Status status = misbehave("EVIL_RUN"); status != ok) return status;
    outputs[0] = inputs[0];
    return ok;
}
EVIL_API Status AOTInductorModelContainerRunSingleThreaded(Handle model, Handle* inputs, std::size_t input_count,
                                                           Handle* outputs, std::size_t output_count, Handle stream,
                                                           Handle proxy) {
    return AOTInductorModelContainerRun(model, inputs, input_count, outputs, output_count, stream, proxy);
}

// It has no constants.
EVIL_API Status AOTInductorModelContainerGetNumConstants(Handle, std::size_t* count) {
    *count = 0;
    return ok;
}
EVIL_API Status AOTInductorModelContainerGetConstantName(Handle, std::size_t, const char**) { return failed; }
EVIL_API Status AOTInductorModelContainerGetConstantOriginalFQN(Handle, std::size_t, const char**) { return failed; }
EVIL_API Status AOTInductorModelContainerGetConstantDtype(Handle, std::size_t, std::int32_t*) { return failed; }
EVIL_API Status AOTInductorModelContainerUpdateConstantBuffer(Handle, Handle, bool, bool) { return failed; }
EVIL_API Status AOTInductorModelContainerUpdateInactiveConstantBuffer(Handle, Handle) { return failed; }
EVIL_API Status AOTInductorModelContainerUpdateUserManagedConstantBuffer(Handle, Handle, bool, bool) { return failed; }
EVIL_API Status AOTInductorModelContainerFreeInactiveConstantBuffer(Handle) { return failed; }
EVIL_API Status AOTInductorModelContainerExtractConstantsMap(Handle, Handle, bool) { return failed; }
EVIL_API Status AOTInductorModelContainerGetConstantsBlobSize(Handle, std::uint64_t*) { return failed; }
EVIL_API Status AOTInductorModelUpdateConstantsFromBlob(Handle, const std::uint8_t*) { return failed; }
EVIL_API Status AOTInductorModelContainerRunConstantFolding(Handle, bool, Handle, Handle) { return ok; }
EVIL_API Status AOTInductorModelContainerSwapConstantBuffer(Handle) { return ok; }
EVIL_API Status AOTInductorModelContainerGetCallSpec(Handle, const char** in, const char** out) {
    *in = *out = "";
    return ok;
}
