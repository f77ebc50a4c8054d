#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet_keys.h"
#include "ipc/channel/wire.h"

namespace bulkhead::config {

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

/// Of runtime python: what is loaded, and by which interpreter.
struct PythonSpec {
    std::string engine;                 ///< "module:Class", or "/absolute/file.py:Class"
    std::filesystem::path interpreter;  ///< absolute; empty: `python3` beside our programs, else on PATH
    boost::json::object options;        ///< handed to the engine as they are
    friend bool operator==(const PythonSpec&, const PythonSpec&) = default;
};

/// Models that are loaded one at a time on a device, or all together.
struct ModelGroup {
    std::string name;
    GroupKind kind{};
    friend bool operator==(const ModelGroup&, const ModelGroup&) = default;
};

/// What a fleet file may say of a model. Keys that `defaults` may hold too are in `ModelSettings`: fleet.schema.json
/// declares them, with their defaults.
struct ModelSpec : ModelSettings {
    std::string name;
    Runtime runtime{};
    /// Absolute: TorchScript file, .pt2 package, folder of a generating model, or an engine's own file, if it has one.
    std::filesystem::path file;
    std::string device{"auto"};
    std::vector<std::string> other_devices;  ///< where `device` has no room, in this order
    bool preload = false;                    ///< loads when the daemon starts
    bool near = false;                       ///< its files are kept in the page cache
    std::uint32_t replicas = 1;              ///< at most
    std::uint32_t replicas_min = 1;
    std::optional<ModelGroup> group;
    std::map<std::string, std::string> environment;
    StateScope state = StateScope::none;  ///< channel: one channel at a time, reset between
    std::string reset_method;             ///< called between channels when `state` is channel
    std::vector<MethodSpec> methods;
    GenerateSpec generate;  ///< of runtime generate; what it leaves open, the package's manifest settles
    PythonSpec python;
    friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
};

/// What all models together may use of one device's memory.
struct DeviceLimit {
    std::uint32_t share_percent = 100;
    std::optional<std::uint64_t> share_bytes{};  ///< instead of the share
    std::uint64_t margin_bytes = 0;              ///< for other programs
    friend bool operator==(const DeviceLimit&, const DeviceLimit&) = default;
};

struct Fleet {
    std::filesystem::path source;                 ///< absolute path of the YAML file
    std::vector<ModelSpec> models;                ///< in the order of the file
    std::map<std::string, DeviceLimit> limits{};  ///< by device, as it is written
    std::vector<std::string> startup{};           ///< models to load first, in this order
    /// Processes that wait for a model, by device as it is written: for each way in which models there are started.
    /// None is 0, and each GPU has a limit.
    std::map<std::string, std::uint32_t> blanks{};
    std::uint64_t near_bytes = 0;  ///< of models' files to keep in the page cache
    friend bool operator==(const Fleet&, const Fleet&) = default;
};

}  // namespace bulkhead::config
