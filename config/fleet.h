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

/// The range of one dimension, both ends included; a fixed one has equal ends.
struct DimRange {
    std::int64_t min = 1;
    std::int64_t max = 1;
    std::string name{};  ///< dimensions of one name have the same size in a request
    friend bool operator==(const DimRange&, const DimRange&) = default;
};

struct TensorSpec {
    std::string name;
    wire::DType dtype{};
    std::vector<DimRange> shape;  ///< at most `wire::rank_max`; empty for a scalar tensor
    bool out = false;             ///< an output passed as an argument, which the method writes
    friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

using ParameterValue = std::variant<std::int64_t, double, bool, std::string>;

/// A non-tensor argument of a method.
struct ParameterSpec {
    std::string name;
    ParameterType type{};
    std::optional<ParameterValue> default_value;  ///< empty: every request must give a value
    friend bool operator==(const ParameterSpec&, const ParameterSpec&) = default;
};

/// A set of fixed input shapes with its own graph, in the order of the method's inputs.
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
    /// Padding value by input name. Present: padding a request up to a bucket is safe.
    std::map<std::string, double> padding;
    /// Shapes of the warm-up inference by input; an undeclared one uses its lower bounds.
    std::map<std::string, std::vector<std::int64_t>> warmup;
    /// Does the method write all its outputs into memory it is given? All or none do.
    [[nodiscard]] bool takes_outputs() const { return !outputs.empty() && outputs.front().out; }
    friend bool operator==(const MethodSpec&, const MethodSpec&) = default;
};

/// For runtime python: what is loaded, and by which interpreter.
struct PythonSpec {
    std::string engine;                 ///< "module:Class", or "/absolute/file.py:Class"
    std::filesystem::path interpreter;  ///< absolute; empty: `python3` beside our
                                        ///< programs, else on PATH
    boost::json::object options;        ///< passed to the engine unchanged
    friend bool operator==(const PythonSpec&, const PythonSpec&) = default;
};

/// Models that are loaded one at a time on a device, or all together.
struct ModelGroup {
    std::string name;
    GroupKind kind{};
    friend bool operator==(const ModelGroup&, const ModelGroup&) = default;
};

/// What a fleet file can say of a model. Keys that `defaults` can hold too are in `ModelSettings`:
/// fleet.schema.json declares them and their defaults.
struct ModelSpec : ModelSettings {
    std::string name;
    Runtime runtime{};
    /// Absolute: TorchScript file, .pt2 package, folder of a generating model, or an engine's own
    /// file, if it has one.
    std::filesystem::path file;
    std::string device{"auto"};
    std::vector<std::string> other_devices;  ///< used in this order if `device` has no room
    bool preload = false;                    ///< loads when the daemon starts
    bool near = false;                       ///< its files are kept in the page cache
    std::uint32_t replicas = 1;              ///< maximum
    std::uint32_t replicas_min = 1;
    std::optional<ModelGroup> group;
    std::map<std::string, std::string> environment;
    StateScope state = StateScope::none;  ///< channel: serves one channel at a time, reset between
    std::string reset_method;             ///< called between channels when `state` is channel
    std::vector<MethodSpec> methods;
    GenerateSpec generate;  ///< for runtime generate; open values come from the package's manifest
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
    std::map<std::string, DeviceLimit> limits{};  ///< by device name as written
    std::vector<std::string> startup{};           ///< models to load first, in this order
    /// Processes that wait for a model, by device name as written; the count is per way in which
    /// models there are started. No count is 0, and each GPU here has a limit.
    std::map<std::string, std::uint32_t> blanks{};
    std::uint64_t near_bytes = 0;  ///< bytes of model files to keep in the page cache
    friend bool operator==(const Fleet&, const Fleet&) = default;
};

}  // namespace bulkhead::config
