#pragma once

/// An opened generation package: checks it before any of its code runs, and loads its functions
/// with their weights.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "worker/generation/models/manifest.h"
#include "worker/generation/models/weights_file.h"
#include "worker/package/package_cache.h"
#include "worker/torch/function.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker::generation {

/// What an engine needs for a step. The `Package` owns the functions' weights and
/// must outlive this.
struct Parts {
    Manifest manifest;
    int threads = 1;                    ///< for one step on a CPU
    std::unique_ptr<Function> prefill;  ///< null: a prompt goes through decode, one position a call
    struct Decode {
        std::uint32_t sequences_min;
        std::uint32_t sequences_max;
        std::unique_ptr<Function> function;
    };
    std::vector<Decode> decode;
};

class Package {
public:
    /// Reads the manifest of the folder `spec.file`, settles its shape, maps the weights and
    /// unpacks the functions into the cache. Verifies the manifest's hashes: of functions always,
    /// of weights only on a CPU (docs/decisions.md).
    /// Errors  config_invalid, load_failed, package_incompatible, resources_exhausted
    static Result<Package> open(const config::ModelSpec& spec, const LoadContext& context);

    [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }
    [[nodiscard]] const WeightsFile& weights() const noexcept { return weights_; }

    /// Checks manifest and functions against this machine's device, torch, GPU and CPU. A GPU needs
    /// a prefill. Errors  package_incompatible
    [[nodiscard]] Result<> check(const Machine& machine) const;

    /// Puts all weights onto the device. On a CPU, copies them to huge pages with `threads`
    /// threads, unless `has_room` refuses: then they stay mapped.
    void place_weights(Device& device, int threads, const std::function<bool(std::uint64_t bytes)>& has_room,
                       const LoadContext& context);

    /// Loads one of the manifest's files and gives it its weights.
    /// Throws  ErrorException (package_incompatible): a constant is missing or has another dtype or
    ///         size, or the number of inputs differs; what LibTorch throws
    [[nodiscard]] std::unique_ptr<Function> load(Device& device, const std::string& file, std::size_t inputs) const;

    /// `may_write_inputs` for one of the manifest's files.
    [[nodiscard]] bool may_write(const std::string& file, std::size_t inputs) const {
        return may_write_inputs(functions_.at(file).compiled, inputs);
    }

private:
    Package(Manifest manifest, WeightsFile weights, std::filesystem::path folder)
        : manifest_{std::move(manifest)}, weights_{std::move(weights)}, folder_{std::move(folder)} {}
    Result<> unpack(const std::string& file, PackageCache& cache, const LoadContext& context);
    Result<> check_weights(const PackageCache& cache, const LoadContext& context) const;
    /// Errors  package_incompatible if the manifest has another hash
    [[nodiscard]] Result<> check_hash(const std::string& file, const std::string& sha256) const;

    Manifest manifest_;
    WeightsFile weights_;
    std::filesystem::path folder_;
    struct Unpacked {
        UnpackedPackage held;
        CompiledModel compiled;
    };
    std::map<std::string, Unpacked> functions_;  ///< by file name
    std::map<std::string, at::Tensor, std::less<>> placed_;
};

/// Makes the engine of a CPU, which calls the package's functions and the sampler in order. One
/// graph of dynamic sizes serves all attention lengths; a step attends over the length of its
/// longest sequence.
///
/// Throws  ErrorException: out_of_memory; what LibTorch throws
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Parts parts);

/// Loads the package in the folder `spec.file`: manifest, weights, compiled functions, warm-up, and
/// on a GPU the captured steps. Sets the model's `generator()`; `methods()` are the package's
/// further methods.
/// Errors  config_invalid, package_incompatible, load_failed, capture_failed, out_of_memory (names
///         what would fit)
[[nodiscard]] Result<std::unique_ptr<Model>> load_generator(const config::ModelSpec& spec, const LoadContext& context);

}  // namespace bulkhead::worker::generation
