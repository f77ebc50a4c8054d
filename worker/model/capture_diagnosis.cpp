#include "worker/model/capture_diagnosis.h"

#include <array>
#include <charconv>

#include <fmt/format.h>

#include "worker/model/describe.h"

namespace bulkhead::worker {
namespace {

/// One way in which captures fail. The first rule whose text or number matches counts.
struct Rule {
    std::string_view cause;
    int cuda_error;           ///< 0: matches by text only
    std::string_view needle;  ///< empty: matches by number only
    std::string_view reason;
    std::string_view remedy;
};

constexpr std::string_view host_read_reason =
    "the model waits for the GPU or reads a GPU value on the host, which a captured graph cannot do";
constexpr std::string_view host_read_remedy =
    "keep the value on the device: no .item(), .tolist(), .cpu(), nonzero() or `if tensor:`; use torch.where and masks";
constexpr std::string_view cpu_tensor_reason = "a tensor is made on the CPU and copied to the GPU during the call";
constexpr std::string_view cpu_tensor_remedy =
    "make it on the device (device=x.device), or once before the call with register_buffer";

// The numbers are cudaError_t's, from CUDA 13.0's driver_types.h. Text rules come first: CUDA gives
// a failed host read and a failed copy the same number, but LibTorch's texts differ.
constexpr std::array rules{
    Rule{"cpu_tensor", 0, "Cannot copy between CPU and CUDA tensors during CUDA graph capture", cpu_tensor_reason,
         cpu_tensor_remedy},
    Rule{"cpu_tensor", 0, "Expected all tensors to be on the same device",
         "a tensor stays on the CPU while others are on the GPU", cpu_tensor_remedy},
    Rule{"generator", 0, "Attempt to increase offset for a CUDA generator not in capture mode",
         "random numbers come from a generator that the graph does not know",
         "use the default generator: leave out `generator=`"},
    Rule{"generator", 0, "Offset increment outside graph capture encountered unexpectedly",
         "an earlier capture failed and left the random generator in capture mode",
         "restart the model's worker once the first failure is cured"},
    Rule{"generator", 0, "set_current_seed can be called during stream capture", "the call seeds the random generator",
         "seed before the call, never in it"},
    Rule{"unsupported_operation", 0, "CTCLoss cannot be graph captured", "CTC loss reads its lengths on the host",
         "move the lengths to the device"},
    Rule{"out_of_memory", 2, "CUDA out of memory", "the GPU has no room for the graph's own memory pool",
         "declare fewer or smaller buckets, or choose a GPU with more free memory"},
    Rule{"out_of_memory", 0, "CUDA error: out of memory", "the GPU has no room for the graph's own memory pool",
         "declare fewer or smaller buckets, or choose a GPU with more free memory"},
    Rule{"legacy_stream", 906, "cudaErrorStreamCaptureImplicit", "an operation uses the legacy default stream",
         "let custom operators use the current stream (c10::cuda::getCurrentCUDAStream)"},
    Rule{"unjoined_stream", 904, "cudaErrorStreamCaptureUnjoined",
         "work was sent to a second stream and not joined with the first",
         "let the first stream wait for the second before the call ends"},
    Rule{"unjoined_stream", 905, "cudaErrorStreamCaptureIsolation",
         "the call depends on work that another stream began outside of it", "join that work before the call begins"},
    Rule{"wrong_thread", 908, "cudaErrorStreamCaptureWrongThread", "the call goes on in another thread",
         "run the model in one thread: no fork/wait in TorchScript"},
    Rule{"host_read", 900, "cudaErrorStreamCaptureUnsupported", host_read_reason, host_read_remedy},
    Rule{"host_read", 0, "operation not permitted when stream is capturing", host_read_reason, host_read_remedy},
    Rule{"package_code", 0, "API call failed at",
         "the package's compiled code did something that a graph cannot record; its words are in the worker's log",
         "read `bulkhead logs`; export without host reads and without tensors made on the CPU"},
    Rule{"unsupported_operation", 901, "cudaErrorStreamCaptureInvalidated",
         "an operation that a graph cannot record ended the capture, and the call went on without reporting it",
         "look for caught exceptions around host reads and copies in the model's own operators"},
};

bool fits(const Rule& rule, std::string_view text) {
    return !rule.needle.empty() && text.find(rule.needle) != std::string_view::npos;
}

/// Finds the innermost frame of the model's original source. TorchScript prints `File "x.py", line
/// 12, in f`, some source, and `~~~~ <--- HERE` under the failing line. Packages without debug
/// records have none.
void find_model_frame(std::string_view text, CaptureDiagnosis& diagnosis) {
    const std::size_t original = text.find("Traceback of TorchScript, original code");
    if (original == std::string_view::npos) return;
    const std::string_view traceback = text.substr(original);

    constexpr std::string_view opening = "File \"";
    const std::size_t file = traceback.rfind(opening);
    if (file == std::string_view::npos) return;
    const std::string_view frame = traceback.substr(file + opening.size());
    const std::string_view head = frame.substr(0, frame.find('\n'));
    const std::size_t quote = head.find("\", line ");
    if (quote == std::string_view::npos) return;
    std::string_view path = head.substr(0, quote);
    if (const std::size_t slash = path.rfind('/'); slash != std::string_view::npos) path.remove_prefix(slash + 1);

    constexpr std::string_view line_word = "\", line ";
    std::string_view rest = head.substr(quote + line_word.size());
    int number = 0;
    const auto [end, failed] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
    if (failed != std::errc{}) return;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    constexpr std::string_view in_word = ", in ";
    const std::string_view function =
        rest.starts_with(in_word) ? trimmed(rest.substr(in_word.size())) : std::string_view{};

    diagnosis.where = fmt::format("{}:{}{}{}", path, number, function.empty() ? "" : " in ", function);
    const std::size_t marker = frame.find("<--- HERE");
    const std::size_t source_end = marker == frame.npos ? frame.npos : frame.rfind('\n', marker);
    if (source_end == frame.npos) return;
    const std::string_view source = frame.substr(0, source_end);
    diagnosis.line = trimmed(source.substr(source.rfind('\n') + 1));
}

/// Returns the model's own message without the traceback: its last "XError: …" line, else
/// the first line.
std::string_view own_words(std::string_view text) {
    constexpr std::string_view error_word = "Error: ";
    if (const std::size_t at = text.rfind(error_word); at != std::string_view::npos) {
        const std::string_view words = text.substr(at + error_word.size());
        return trimmed(words.substr(0, words.find('\n')));
    }
    return trimmed(text.substr(0, text.find('\n')));
}

CaptureDiagnosis from(const Rule& rule, std::string_view text) {
    CaptureDiagnosis diagnosis{rule.cause, std::string{rule.reason}, std::string{rule.remedy}};
    find_model_frame(text, diagnosis);
    return diagnosis;
}

}  // namespace

std::string CaptureDiagnosis::sentence() const {
    if (where.empty()) return reason;
    if (line.empty()) return fmt::format("{} (at {})", reason, where);
    return fmt::format("{} (at {}: {})", reason, where, line);
}

CaptureDiagnosis diagnose_capture(std::string_view text, int cuda_error) {
    for (const Rule& rule : rules)
        if (fits(rule, text)) return from(rule, text);
    for (const Rule& rule : rules)
        if (rule.cuda_error != 0 && rule.cuda_error == cuda_error) return from(rule, text);
    const std::string raised = fmt::format("the model failed while it was captured: {}", own_words(text));
    return from({"model_raised", 0, {}, raised, "run it eagerly (graphs: off) to see whether it fails there too"},
                text);
}

CaptureDiagnosis output_on_cpu(std::string_view output) {
    return {"output_on_cpu", fmt::format("output \"{}\" is made on the CPU, so a replay would not renew it", output),
            "return it on the device (device=x.device)"};
}

CaptureDiagnosis keeps_state() {
    return {"keeps_state", "two runs on equal inputs and equal random seed differ: the model keeps state between calls",
            "give state as inputs and take it as outputs, or set graphs: off"};
}

CaptureDiagnosis replay_differs(std::string_view output) {
    return {"replay_differs",
            fmt::format("output \"{}\" of the replay differs from the eager run's: a value was fixed during capture",
                        output),
            "compute on the device what depends on the inputs, and do not rebind the module's attributes in the call"};
}

}  // namespace bulkhead::worker
