#include "worker/generation/models/package.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "worker/file/model_file.h"
#include "worker/model/read_ahead.h"

namespace bulkhead::worker::generation {
namespace {

std::set<std::string> files_of(const Manifest& manifest) {
    std::set<std::string> files;
    if (manifest.prefill) files.insert(manifest.prefill->file);
    for (const auto& decode : manifest.decode) files.insert(decode.file);
    for (const auto& method : manifest.methods) files.insert(method.file);
    return files;
}

}  // namespace

Result<Package> Package::open(const config::ModelSpec& spec, const LoadContext& context) {
    const std::filesystem::path& folder = spec.file;
    auto manifest = read_manifest_of(folder);
    if (!manifest) return manifest.error();
    if (auto settled = settle(*manifest, spec.generate); !settled) return settled.error();
    auto weights = WeightsFile::open(folder / manifest->weights_file, manifest->weights_bytes);
    if (!weights) return weights.error();
    Package package{std::move(*manifest), std::move(*weights), folder};
    PackageCache cache{context.cache};
    for (const std::string& file : files_of(package.manifest_))
        if (auto unpacked = package.unpack(file, cache, context); !unpacked)
            return unpacked.error().during(folder.string());
    if (!context.cuda)
        if (auto checked = package.check_weights(cache, context); !checked)
            return checked.error().during(folder.string());
    return package;
}

Result<> Package::unpack(const std::string& file, PackageCache& cache, const LoadContext& context) {
    auto opened = ModelFile::open(folder_ / file);
    if (!opened) return opened.error();
    const std::uint64_t total = 2 * opened->size_bytes();
    auto held = cache.open(
        *opened, [&](std::uint64_t done) { context.report("reading", std::min(done, total), total, "bytes", file); });
    if (!held) return held.error();
    if (auto same = check_hash(file, held->folder.filename().string()); !same) return same;
    auto compiled = find_compiled_model(held->folder);
    if (!compiled) return compiled.error().during(file);
    functions_.emplace(file, Unpacked{std::move(*held), std::move(*compiled)});
    return {};
}

Result<> Package::check_weights(const PackageCache& cache, const LoadContext& context) const {
    if (!manifest_.sha256.contains(manifest_.weights_file)) return {};
    const auto file = ModelFile::open_any(folder_ / manifest_.weights_file);
    if (!file) return file.error();
    auto hash = cache.sha256(*file, [&](std::uint64_t done) {
        context.report("reading", done, file->size_bytes(), "bytes", manifest_.weights_file);
    });
    if (!hash) return hash.error();
    return check_hash(manifest_.weights_file, *hash);
}

Result<> Package::check_hash(const std::string& file, const std::string& sha256) const {
    const auto said = manifest_.sha256.find(file);
    if (said == manifest_.sha256.end() || said->second == sha256) return {};
    return Error{ErrorCode::package_incompatible,
                 fmt::format("reading {}: its SHA-256 is {}, its manifest says {}", file, sha256, said->second),
                 fmt::format("copy the package again, or {}", export_again)};
}

Result<> Package::check(const Machine& machine) const {
    const auto told = [&](Error error, const std::string& what) {
        error.remedy = fmt::format("{}, by python -m bulkhead.export", error.remedy);
        return std::move(error).during(what);
    };
    if (auto fits = check_compatible(manifest_.compiled, machine); !fits)
        return told(fits.error(), (folder_ / "manifest.json").string());
    if (machine.device == "cuda" && !manifest_.prefill)
        return Error{ErrorCode::package_incompatible,
                     fmt::format("{}: it has no \"prefill\", without which a GPU cannot compute a prompt",
                                 (folder_ / "manifest.json").string()),
                     std::string{export_again}};
    for (const auto& [file, unpacked] : functions_)
        if (auto fits = check_compatible(unpacked.compiled, machine); !fits)
            return told(fits.error(), (folder_ / file).string());
    return {};
}

void Package::place_weights(Device& device, int threads, const std::function<bool(std::uint64_t)>& has_room,
                            const LoadContext& context) {
    if (!context.cuda) {
        read_ahead(folder_, [&](std::uint64_t done, std::uint64_t total) {
            context.report("reading", done, total, "bytes", manifest_.weights_file);
        });
        weights_.copy_to_huge_pages(threads, [&](std::uint64_t done) {
            context.report("loading", done, weights_.size_bytes(), "bytes", manifest_.weights_file);
            return has_room(weights_.size_bytes() - done);
        });
    }
    std::uint64_t done = 0;
    for (const auto& [name, weight] : weights_.tensors()) {
        const TensorView view{
            name, weight.dtype, weight.dims, {const_cast<std::byte*>(weight.bytes.data()), weight.bytes.size()}};
        placed_.emplace(name, device.place_weight(view));
        done += weight.bytes.size();
        if (context.cuda) context.report("loading", done, weights_.size_bytes(), "bytes", manifest_.weights_file);
    }
    if (context.cuda)
        context.report("loading", weights_.size_bytes(), weights_.size_bytes(), "bytes", manifest_.weights_file);
}

std::unique_ptr<Function> Package::load(Device& device, const std::string& file, std::size_t inputs) const {
    const auto disagree = [&](std::string what) {
        throw ErrorException{{ErrorCode::package_incompatible,
                              fmt::format("loading {}: {}", (folder_ / file).string(), std::move(what)),
                              std::string{export_again}}};
    };
    const CompiledModel& compiled = functions_.at(file).compiled;
    auto function = device.load_function(compiled.library.string(), compiled.folder.string());
    if (function->input_count() != inputs)
        disagree(fmt::format("it takes {} tensors, by its manifest it would take {}", function->input_count(), inputs));

    const auto renamed = manifest_.constants.find(file);
    std::unordered_map<std::string, at::Tensor> tensors;
    for (const Function::Constant& constant : function->constants()) {
        std::string name = constant.fqn;
        if (renamed != manifest_.constants.end())
            if (const auto found = renamed->second.find(name); found != renamed->second.end()) name = found->second;
        const auto placed = placed_.find(name);
        if (placed == placed_.end())
            disagree(fmt::format("its constant {} is not among the weights (looked for as {})", constant.fqn, name));
        const at::Tensor& tensor = placed->second;
        // The code rounds some constants' sizes up to whole lines of 64 bytes.
        const std::size_t lines = (tensor.nbytes() + 63) / 64 * 64;
        if (tensor.scalar_type() != constant.dtype || (constant.bytes != tensor.nbytes() && constant.bytes != lines))
            disagree(fmt::format("its constant {} is {} of {} bytes, the weights hold {} of {}", constant.fqn,
                                 c10::toString(constant.dtype), constant.bytes, c10::toString(tensor.scalar_type()),
                                 tensor.nbytes()));
        tensors.emplace(constant.name, tensor);
    }
    function->use(std::move(tensors));
    return function;
}

}  // namespace bulkhead::worker::generation
