#include <algorithm>

#include <fmt/format.h>

#include "worker/generation/engine.h"
#include "worker/generation/generate_parameters.h"
#include "worker/generation/models/fit.h"
#include "worker/generation/models/package.h"
#include "worker/torch/aoti_runtime.h"
#include "worker/torch/device_model.h"
#include "worker/torch/inference_threads.h"

namespace bulkhead::worker::generation {
namespace {

/// Rewrites a failure of the first step: the functions do not fit the manifest's tensors.
Error contradicts(Error error) {
    if (error.code != ErrorCode::inference_failed) return error;
    return {ErrorCode::package_incompatible, std::move(error.attempt),
            fmt::format("the functions of the package are not what its manifest says: {}", export_again)};
}

class GeneratingModel final : public DeviceModel {
public:
    GeneratingModel(Package package, std::unique_ptr<Device> device, int threads)
        : DeviceModel{threads, {}, std::move(device)}, package_{std::move(package)} {}

    /// Loads the package and tries it once. An out_of_memory names what needs less.
    Result<> make_ready(const config::ModelSpec& spec, const LoadContext& context);

    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& parameters, OutputSink& sink) override {
        const auto at = std::ranges::find(methods_, method.name, &config::MethodSpec::name) - methods_.begin();
        return guarded(fmt::format("running {}", method.name), ErrorCode::inference_failed, [&] {
            return device_->run(*runtimes_.at(static_cast<std::size_t>(at)), method, inputs, parameters, sink);
        });
    }
    Result<> reset() override { return {}; }
    [[nodiscard]] Engine* generator() noexcept override { return engine_.get(); }
    [[nodiscard]] bool writes_inputs() const noexcept override { return writes_inputs_; }

private:
    /// Throws what LibTorch throws.
    Result<> load(const config::ModelSpec& spec, const LoadContext& context);

    Package package_;
    std::vector<std::unique_ptr<Runtime>> runtimes_;  ///< of `methods_`
    std::shared_ptr<Engine> engine_;                  ///< uses the package's weights
    bool writes_inputs_ = false;                      ///< a function may write to its
                                                      ///< inputs, apart from KV
};

Result<> GeneratingModel::make_ready(const config::ModelSpec& spec, const LoadContext& context) {
    return guarded(fmt::format("loading {}", spec.file.string()), ErrorCode::load_failed, [&]() -> Result<> {
        std::uint64_t weights = context.cuda ? package_.weights().size_bytes() : 0;
        const std::uint64_t free = device_->free_bytes();
        if (auto fits = check_fit(package_.manifest(), weights, free, device_->name()); !fits) return fits;

        if (!context.cuda) bind_team(threads_);
        const auto ready = guarded(fmt::format("loading {}", spec.file.string()), ErrorCode::load_failed, [&] {
            if (auto loaded = load(spec, context); !loaded) return loaded;
            context.report("warming", 0, 1, "steps", "generate");
            if (auto tried = try_once(*engine_, context.cuda ? spec.generate.prefill_chunk : 0); !tried)
                return Result<>{contradicts(tried.error().during("trying a step"))};
            context.report("warming", 1, 1, "steps", "");
            return Result<>{};
        });
        if (ready) return {};
        if (package_.weights().is_copied()) weights = package_.weights().size_bytes();
        return say_what_leaves_more(ready.error(), package_.manifest(), weights, free);
    });
}

Result<> GeneratingModel::load(const config::ModelSpec& spec, const LoadContext& context) {
    const Manifest& manifest = package_.manifest();
    // A copy of the weights is faster to read; a model that fits only with the file
    // mapped still runs.
    const auto has_room = [&](std::uint64_t bytes) {
        return check_fit(manifest, bytes, device_->free_bytes(), device_->name()).has_value();
    };
    package_.place_weights(*device_, threads_, has_room, context);

    const std::size_t kv = std::size_t{2} * manifest.layers;
    Parts parts{manifest, threads_, nullptr, {}};
    const std::size_t functions = manifest.decode.size() + (manifest.prefill ? 1 : 0) + manifest.methods.size();
    std::size_t loaded = 0;
    const auto load = [&](const std::string& file, std::size_t inputs, std::size_t buffers) {
        context.report("loading", loaded, functions, "functions", file);
        ++loaded;
        // A GPU works on copies.
        if (!context.cuda && package_.may_write(file, inputs)) writes_inputs_ = true;
        return package_.load(*device_, file, inputs + buffers);
    };
    for (const Manifest::Decode& decode : manifest.decode) {
        const std::size_t inputs = 3 + (manifest.rope_delta == Manifest::RopeDelta::none ? 0 : 1);
        parts.decode.push_back({decode.sequences_min, decode.sequences_max, load(decode.file, inputs, kv)});
    }
    if (manifest.prefill) {
        const std::size_t ropes = manifest.rope_delta == Manifest::RopeDelta::rope ? 1 : 0;
        parts.prefill = load(manifest.prefill->file, 3 + ropes + manifest.prefill->extras.size(), kv);
    }
    for (const Manifest::Method& method : manifest.methods) {
        methods_.push_back(method.spec);
        runtimes_.push_back(make_aoti_runtime(load(method.file, method.spec.inputs.size(), 0)));
    }
    context.report("loading", functions, functions, "functions", "");

    auto made = guarded("making its steps", ErrorCode::inference_failed, [&]() -> Result<> {
        auto engine = device_->make_engine(std::move(parts), spec.graphs, context);
        if (!engine) return engine.error();
        engine_ = std::move(*engine);
        return {};
    });
    if (!made) return contradicts(made.error());
    if (context.cuda) open_gpu();
    return {};
}

}  // namespace

Result<std::unique_ptr<Model>> load_generator(const config::ModelSpec& spec, const LoadContext& context) {
    auto package = Package::open(spec, context);
    if (!package) return package.error();
    if (auto sound = check_defaults(package->manifest().shape); !sound)
        return Error{ErrorCode::package_incompatible,
                     fmt::format("reading \"sampling\" of {}: {}", (spec.file / "manifest.json").string(),
                                 sound.error().attempt),
                     fmt::format("{}; or {}", sound.error().remedy, export_again)};
    auto device = take_device(context, package->weights().size_bytes() + kv_bytes(package->manifest()));
    if (!device) return device.error();
    const auto machine = Machine::here(context.cuda ? "cuda" : "cpu", (*device)->compute_capability());
    if (auto fits = package->check(machine); !fits) return fits.error();

    auto model = std::make_unique<GeneratingModel>(std::move(*package), std::move(*device), inference_threads(spec));
    if (auto ready = model->make_ready(spec, context); !ready) return ready.error();
    return std::unique_ptr<Model>{std::move(model)};
}

}  // namespace bulkhead::worker::generation
