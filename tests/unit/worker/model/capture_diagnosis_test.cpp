#include "worker/model/capture_diagnosis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

using testing::HasSubstr;

// What LibTorch 2.11 prints when a TorchScript module, loaded from a file, fails: the frames of the
// serialized code first, then those of the source that the file was made from, innermost last, then
// the error itself.
std::string torchscript(std::string_view error) {
    return R"(The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__.py", line 11, in forward
    y = torch.mul(x, 2)
    inner = self.inner
    return (inner).forward(y, )
            ~~~~~~~~~~~~~~ <--- HERE
  File "code/__torch__.py", line 19, in forward
    return torch.mul(x, torch.item(n))
                        ~~~~~~~~~~ <--- HERE

Traceback of TorchScript, original code (most recent call last):
  File "/home/ann/models/fail.py", line 11, in forward
    def forward(self, x):
        y = x * 2
        return self.inner(y)
               ~~~~~~~~~~ <--- HERE
  File "/home/ann/models/fail.py", line 4, in forward
    def forward(self, x):
        return x * n.item()
                   ~~~~~~ <--- HERE
RuntimeError: )" +
           std::string{error} + "\n";
}

constexpr std::string_view not_permitted_when_capturing =
    "CUDA error: operation not permitted when stream is capturing\nSearch for `cudaErrorStreamCaptureUnsupported' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel errors "
    "might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.";

TEST(CaptureDiagnosis, OfAHostReadNamesTheModelsOwnLine) {
    const CaptureDiagnosis diagnosis = diagnose_capture(torchscript(not_permitted_when_capturing));

    EXPECT_EQ(diagnosis.cause, "host_read");
    EXPECT_EQ(diagnosis.where, "fail.py:4 in forward");
    EXPECT_EQ(diagnosis.line, "return x * n.item()");
    EXPECT_THAT(diagnosis.remedy, HasSubstr(".item()"));
    EXPECT_THAT(diagnosis.sentence(), HasSubstr("(at fail.py:4 in forward: return x * n.item())"));
}

TEST(CaptureDiagnosis, OfACpuBornTensorSaysMakeItOnTheDevice) {
    const CaptureDiagnosis diagnosis =
        diagnose_capture(torchscript("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the "
                                     "CPU tensor is pinned. Please use "
                                     "tensor.pin_memory() or allocate the tensor with pin_memory=True."));

    EXPECT_EQ(diagnosis.cause, "cpu_tensor");
    EXPECT_THAT(diagnosis.remedy, HasSubstr("device=x.device"));
}

TEST(CaptureDiagnosis, PrefersLibTorchsWordsToCudasNumber) {
    constexpr int unsupported = 900;
    EXPECT_EQ(diagnose_capture("Cannot copy between CPU and CUDA tensors during CUDA graph capture", unsupported).cause,
              "cpu_tensor");
}

struct Case {
    int cuda_error;
    std::string_view name;
    std::string_view cause;
};

std::ostream& operator<<(std::ostream& out, const Case& of) { return out << of.name; }

class CudaErrors : public testing::TestWithParam<Case> {};

TEST_P(CudaErrors, AreKnownByNumberAndByName) {
    const Case& c = GetParam();

    EXPECT_EQ(diagnose_capture("CUDA error", c.cuda_error).cause, c.cause);
    EXPECT_EQ(diagnose_capture("CUDA error: …\nSearch for `" + std::string{c.name} + "' in https://…").cause, c.cause);
}

INSTANTIATE_TEST_SUITE_P(OfCapture, CudaErrors,
                         testing::Values(Case{900, "cudaErrorStreamCaptureUnsupported", "host_read"},
                                         Case{901, "cudaErrorStreamCaptureInvalidated", "unsupported_operation"},
                                         Case{904, "cudaErrorStreamCaptureUnjoined", "unjoined_stream"},
                                         Case{906, "cudaErrorStreamCaptureImplicit", "legacy_stream"},
                                         Case{908, "cudaErrorStreamCaptureWrongThread", "wrong_thread"}));

TEST(CaptureDiagnosis, OfAFullGpuIsOutOfMemoryByEitherWording) {
    EXPECT_EQ(
        diagnose_capture("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB").cause,
        "out_of_memory");
    EXPECT_EQ(diagnose_capture("CUDA error: out of memory").cause, "out_of_memory");
    EXPECT_EQ(diagnose_capture("no words", 2).cause, "out_of_memory");
}

TEST(CaptureDiagnosis, OfAForeignGeneratorSaysUseTheDefault) {
    const CaptureDiagnosis diagnosis =
        diagnose_capture("Attempt to increase offset for a CUDA generator not in capture mode.");

    EXPECT_EQ(diagnosis.cause, "generator");
    EXPECT_THAT(diagnosis.remedy, HasSubstr("generator="));
}

TEST(CaptureDiagnosis, OfCompiledCodePointsToTheLogWhereItsWordsAre) {
    const CaptureDiagnosis diagnosis =
        diagnose_capture("run_func_( container_handle_, input_handles.data()) API call failed at "
                         "/pytorch/torch/csrc/inductor/aoti_runner/model_container_runner.cpp, line 149");

    EXPECT_EQ(diagnosis.cause, "package_code");
    EXPECT_THAT(diagnosis.remedy, HasSubstr("bulkhead logs"));
}

TEST(CaptureDiagnosis, OfAnyOtherErrorKeepsTheModelsOwnWords) {
    const CaptureDiagnosis diagnosis = diagnose_capture(torchscript("shape '[7, 9]' is invalid for input of size 3"));

    EXPECT_EQ(diagnosis.cause, "model_raised");
    EXPECT_THAT(diagnosis.reason, HasSubstr("shape '[7, 9]' is invalid for input of size 3"));
    EXPECT_EQ(diagnosis.where, "fail.py:4 in forward");
}

TEST(CaptureDiagnosis, WithoutATracebackNamesNoPlace) {
    EXPECT_EQ(diagnose_capture(not_permitted_when_capturing).where, "");
    EXPECT_EQ(diagnose_capture("").cause, "model_raised");
}

TEST(CaptureDiagnosis, OfATracebackThatIsCutAnywhereStillEnds) {
    const std::string whole = torchscript(not_permitted_when_capturing);
    for (std::size_t length = 0; length < whole.size(); ++length)
        EXPECT_FALSE(diagnose_capture(std::string_view{whole}.substr(0, length)).reason.empty()) << length;
}

}  // namespace
}  // namespace bulkhead::worker
