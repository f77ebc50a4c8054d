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

struct Case {
    std::string text;
    int cuda_error;
    std::string_view cause;
    const char* remedy = "";
};

TEST(CaptureDiagnosis, KnowsLibTorchsWordsAndElseCudasNumber) {
    const std::string capturing_copy = "Cannot copy between CPU and CUDA tensors during CUDA graph capture";
    std::vector<Case> all{
        {torchscript(capturing_copy + " unless the CPU tensor is pinned. Please use tensor.pin_memory()"), 0,
         "cpu_tensor", "device=x.device"},
        {capturing_copy, 900, "cpu_tensor"},
        {"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB", 0, "out_of_memory"},
        {"CUDA error: out of memory", 0, "out_of_memory"},
        {"no words", 2, "out_of_memory"},
        {"Attempt to increase offset for a CUDA generator not in capture mode.", 0, "generator", "generator="},
        {"run_func_( container_handle_, input_handles.data()) API call failed at "
         "/pytorch/torch/csrc/inductor/aoti_runner/model_container_runner.cpp, line 149",
         0, "package_code", "bulkhead logs"},
    };
    const std::tuple<int, const char*, const char*> numbered[]{
        {900, "cudaErrorStreamCaptureUnsupported", "host_read"},
        {901, "cudaErrorStreamCaptureInvalidated", "unsupported_operation"},
        {904, "cudaErrorStreamCaptureUnjoined", "unjoined_stream"},
        {906, "cudaErrorStreamCaptureImplicit", "legacy_stream"},
        {908, "cudaErrorStreamCaptureWrongThread", "wrong_thread"}};
    for (const auto& [number, name, cause] : numbered) {
        all.push_back({"CUDA error", number, cause});
        all.push_back({"CUDA error: …\nSearch for `" + std::string{name} + "' in https://…", 0, cause});
    }
    for (const Case& one : all) {
        SCOPED_TRACE(one.text);
        const CaptureDiagnosis diagnosis = diagnose_capture(one.text, one.cuda_error);
        EXPECT_EQ(diagnosis.cause, one.cause);
        EXPECT_THAT(diagnosis.remedy, HasSubstr(one.remedy));
    }
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
