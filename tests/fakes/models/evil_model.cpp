/// A compiled model that misbehaves as told, in the shape of an AOTInductor library: the C
/// functions that LibTorch's runner looks up (torch/csrc/inductor/aoti_runtime/interface.h),
/// written by hand and linked to nothing.
///
/// EVIL_LOAD and EVIL_RUN say what creating and running it do: misbehave.h has the words.
///
/// EVIL_RUN lets the warm-up pass: it acts on a positive first byte of the input alone.
/// Ok is the identity: one input, one output, the same tensor.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "tests/fakes/models/misbehave.h"

using Status = std::int32_t;
using Handle = void*;

#define EVIL_API extern "C" __attribute__((visibility("default")))

// Of LibTorch's stable C interface, resolved from the process.
EVIL_API Status aoti_torch_get_data_ptr(Handle tensor, void** data);
EVIL_API Status aoti_torch_get_numel(Handle tensor, std::int64_t* count);

namespace {

constexpr Status ok = 0;
constexpr Status failed = 1;

Status misbehave_as(const char* variable) {
    const char* const what = std::getenv(variable);
    return what == nullptr || misbehave(what) ? ok : failed;
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
    return misbehave_as("EVIL_LOAD");
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
        if (const Status status = misbehave_as("EVIL_RUN"); status != ok) return status;
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
