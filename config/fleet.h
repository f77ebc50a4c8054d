#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ipc/wire.h"

namespace bulkhead::config {

enum class Runtime : std::uint8_t { torchscript, aoti, generate };
enum class Graphs : std::uint8_t { off, preferred, required };
enum class RestartPolicy : std::uint8_t { on_crash, never };
enum class StateScope : std::uint8_t { none, channel };  ///< channel: one channel at a time, reset between
enum class LogLevel : std::uint8_t { trace, debug, info, warn, error };

/// One dimension's range, both ends included; a fixed one has equal ends.
struct DimRange {
    std::int64_t min = 1;
    std::int64_t max = 1;
    std::string name{};  ///< dimensions of one name are of one size in a request
    friend bool operator==(const DimRange&, const DimRange&) = default;
};

struct TensorSpec {
    std::string name;
    wire::DType dtype{};
    std::vector<DimRange> shape;  ///< at most `wire::rank_max`; empty for a scalar tensor
    bool out = false;             ///< an output that the method takes as an argument, and writes
    friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

using ParameterValue = std::variant<std::int64_t, double, bool, std::string>;
enum class ParameterType : std::uint8_t { integer, number, boolean, string };

/// A non-tensor argument of a method.
struct ParameterSpec {
    std::string name;
    ParameterType type{};
    std::optional<ParameterValue> default_value;  ///< without one, every request must give it
    friend bool operator==(const ParameterSpec&, const ParameterSpec&) = default;
};

/// A set of fixed input shapes that gets a graph of its own, in the order of the method's inputs.
struct Bucket {
    std::vector<std::vector<std::int64_t>> shapes;
    friend bool operator==(const Bucket&, const Bucket&) = default;
};

struct MethodSpec {
    std::string name = "forward";
    std::vector<TensorSpec> inputs;  ///< in the order of the model's arguments
    std::vector<ParameterSpec> parameters;
    std::vector<TensorSpec> outputs;  ///< in the order of the model's results
    std::vector<Bucket> buckets;
    /// Padding a request up to a bucket is safe: by input name, the value that fills the rest.
    std::map<std::string, double> padding;
    /// Shapes of the warm-up inference, by input; the lower bounds where not declared.
    std::map<std::string, std::vector<std::int64_t>> warmup;
    /// Whether the method writes its outputs where it is told to: all of them, or none.
    [[nodiscard]] bool takes_outputs() const { return !outputs.empty() && outputs.front().out; }
    friend bool operator==(const MethodSpec&, const MethodSpec&) = default;
};

struct Deadlines {
    std::chrono::milliseconds load{120'000};     ///< without progress; each report of progress extends it
    std::chrono::milliseconds capture{120'000};  ///< the same for capturing graphs
    std::chrono::milliseconds request{30'000};   ///< of one inference, or of one step of a long one
    std::chrono::milliseconds drain{10'000};
    std::chrono::milliseconds kill{5'000};  ///< from SIGTERM to SIGKILL
    friend bool operator==(const Deadlines&, const Deadlines&) = default;
};

struct ChannelLimits {
    std::uint64_t input_bytes = 4u << 20;  ///< of the input slab a channel starts with
    std::uint64_t output_bytes = 4u << 20;
    std::uint64_t bytes_max = 512u << 20;  ///< all slabs of one channel together
    std::uint32_t channels_max = 64;
    std::uint64_t worker_bytes_max = std::uint64_t{8} << 30;  ///< all slabs of all channels of one worker together
    std::chrono::milliseconds idle{30'000};  ///< a grown output slab without a result is withdrawn after it
    bool huge_pages = false;                 ///< slabs on 2 MiB pages, where the machine has them
    friend bool operator==(const ChannelLimits&, const ChannelLimits&) = default;
};

/// What a fleet file may settle about an autoregressive model. What it leaves open, the package's manifest settles.
struct GenerateSpec {
    std::optional<std::uint32_t> slots;   ///< sequences at once
    std::optional<std::uint32_t> length;  ///< positions of a sequence, prompt and generated tokens together
    std::uint32_t prefill_chunk = 128;    ///< positions of a prompt computed between two steps of the others
    std::vector<std::uint32_t> buckets;   ///< attention lengths that a GPU captures, ascending; empty: the manifest's
    friend bool operator==(const GenerateSpec&, const GenerateSpec&) = default;
};

struct ModelSpec {
    std::string name;
    Runtime runtime{};
    std::filesystem::path file;   ///< absolute: TorchScript file, .pt2 package, or folder of a generating model
    std::string device = "auto";  ///< auto, cpu, cuda:N or a GPU UUID
    std::uint32_t replicas = 1;
    bool preload = false;
    std::uint32_t threads = 0;  ///< of one inference on a CPU; 0: all cores of the affinity mask
    Graphs graphs = Graphs::preferred;
    Deadlines deadlines;
    std::chrono::milliseconds watchdog{0};  ///< an idle worker is asked whether it lives this often; 0: never
    std::uint32_t queue_bound = 64;         ///< requests waiting or running, all channels together
    ChannelLimits channel;
    std::map<std::string, std::string> environment;
    RestartPolicy restart = RestartPolicy::on_crash;
    StateScope state = StateScope::none;
    std::string reset_method;  ///< called between channels when `state` is channel
    LogLevel log_level = LogLevel::info;
    std::uint64_t core_bytes_max = 0;
    std::vector<MethodSpec> methods;
    GenerateSpec generate;  ///< of runtime generate
    friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
};

struct Fleet {
    std::filesystem::path source;   ///< absolute path of the YAML file
    std::vector<ModelSpec> models;  ///< in the order of the file
    friend bool operator==(const Fleet&, const Fleet&) = default;
};

}  // namespace bulkhead::config
