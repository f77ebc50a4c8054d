#include "worker/generation/models/manifest.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <numeric>
#include <ranges>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "config/reader.h"
#include "ipc/channel/dtype.h"
#include "worker/generation/limits.h"

namespace bulkhead::worker::generation {
namespace {

namespace fs = std::filesystem;
namespace json = boost::json;

/// One place in the document, with the errors for it.
class Field {
public:
    Field(const json::value& value, std::string path, const fs::path& folder)
        : value_{value}, path_{std::move(path)}, folder_{folder} {}

    [[nodiscard]] const json::value& value() const noexcept { return value_; }
    [[noreturn]] void refuse(std::string_view wanted) const {
        std::string is = json::serialize(value_);
        if (is.size() > 80) is = is.substr(0, 77) + "...";
        fail(path_, fmt::format("{}, which is not {}", is, wanted));
    }
    [[nodiscard]] Field operator[](std::string_view key) const {
        if (auto found = find(key)) return *found;
        fail(joined(key), "missing");
    }
    [[noreturn]] void unknown(std::string_view key) const { fail(joined(key), "unknown"); }
    [[nodiscard]] const json::object& object() const {
        if (!value_.is_object()) refuse("an object");
        return value_.as_object();
    }
    /// Empty if it is missing or null.
    [[nodiscard]] std::optional<Field> find(std::string_view key) const {
        const auto* found = object().if_contains(key);
        if (found == nullptr || found->is_null()) return std::nullopt;
        return Field{*found, joined(key), folder_};
    }
    [[nodiscard]] std::vector<Field> items() const {
        if (!value_.is_array()) refuse("a list");
        std::vector<Field> all;
        for (const auto& item : value_.as_array())
            all.emplace_back(item, fmt::format("{}[{}]", path_, all.size()), folder_);
        return all;
    }
    [[nodiscard]] std::string text() const {
        if (!value_.is_string()) refuse("a string");
        return std::string{value_.as_string()};
    }
    [[nodiscard]] bool boolean() const {
        if (!value_.is_bool()) refuse("true or false");
        return value_.as_bool();
    }
    [[nodiscard]] std::int64_t integer(std::int64_t min, std::int64_t max) const {
        if (!value_.is_int64() || value_.as_int64() < min || value_.as_int64() > max)
            refuse(fmt::format("an integer from {} to {}", min, max));
        return value_.as_int64();
    }
    [[nodiscard]] std::uint32_t count(std::int64_t max, std::int64_t min = 1) const {
        return static_cast<std::uint32_t>(integer(min, max));
    }
    [[nodiscard]] wire::DType dtype() const {
        const auto known = dtype_from(text());
        if (!known) refuse("a dtype such as \"float32\"");
        return *known;
    }
    /// A file name in the package's own folder.
    [[nodiscard]] std::string file() const {
        const std::string name = text();
        if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
            name.find('\0') != std::string::npos)
            refuse("the name of a file in the package's folder");
        return name;
    }
    [[nodiscard]] std::string sha256() const {
        std::string hash = text();
        if (hash.size() != 64 || hash.find_first_not_of("0123456789abcdef") != std::string::npos)
            refuse("a SHA-256, 64 hexadecimal digits");
        return hash;
    }
    [[nodiscard]] std::vector<std::int32_t> tokens(std::uint32_t vocabulary) const {
        std::vector<std::int32_t> ids;
        for (const Field& id : items()) ids.push_back(static_cast<std::int32_t>(id.integer(0, vocabulary - 1)));
        return ids;
    }

private:
    [[noreturn]] void fail(std::string_view path, std::string_view is) const {
        throw ErrorException{{ErrorCode::package_incompatible,
                              fmt::format("reading {}: \"{}\" is {}", (folder_ / "manifest.json").string(), path, is),
                              std::string{export_again}}};
    }
    [[nodiscard]] std::string joined(std::string_view key) const {
        return path_.empty() ? std::string{key} : fmt::format("{}.{}", path_, key);
    }

    const json::value& value_;
    std::string path_;
    const fs::path& folder_;
};

bool is_floating(wire::DType dtype) {
    return dtype == wire::DType::float32 || dtype == wire::DType::float16 || dtype == wire::DType::bfloat16;
}

void read_prefill(const Field& from, Manifest& manifest) {
    Manifest::Prefill& prefill = manifest.prefill.emplace();
    Shape& shape = manifest.shape;
    prefill.file = from["file"].file();
    const Field input = from["input"];
    shape.embeddings = input.text() == "embeddings";
    if (!shape.embeddings && input.text() != "tokens") input.refuse("\"tokens\" or \"embeddings\"");
    if (shape.embeddings) prefill.width = from["width"].integer(1, limits::width_max);
    if (is_floating(manifest.weights_dtype)) prefill.embeddings_dtype = manifest.weights_dtype;
    if (const auto least = from.find("chunk_min")) prefill.chunk_min = least->count(2);
    prefill.chunk_max = from["chunk_max"].count(manifest.length_max, prefill.chunk_min);
    if (const auto logits = from.find("logits")) shape.prefill_gives = logits->boolean();
    if (const auto extras = from.find("extras"))
        for (const Field& item : extras->items()) {
            Manifest::Extra extra{item["name"].text(), item["dtype"].dtype(), {}};
            bool along_prompt = false;
            for (const Field& dim : item["shape"].items()) {
                const bool prompt = dim.value().is_string() && dim.text() == "T" && !along_prompt;
                along_prompt = along_prompt || prompt;
                extra.dims.push_back(prompt ? Manifest::prompt_dim : dim.integer(1, limits::width_max));
            }
            if (!along_prompt) item["shape"].refuse("a shape with one dimension \"T\"");
            prefill.extras.push_back(std::move(extra));
        }
    if (const auto ids = from.find("ids")) {
        const auto range = ids->items();
        if (range.size() != 2) ids->refuse("a range [least, end)");
        shape.prompt_id_min = range[0].integer(-1, 0);
        shape.prompt_id_end = range[1].integer(1, std::numeric_limits<std::int32_t>::max());
    }
}

Manifest::RopeDelta read_rope_delta(const Field& from) {
    if (from.value().is_bool()) return from.boolean() ? Manifest::RopeDelta::rope : Manifest::RopeDelta::none;
    if (from.value().is_string() && from.text() == "rope") return Manifest::RopeDelta::rope;
    if (from.value().is_string() && from.text() == "prompt") return Manifest::RopeDelta::prompt;
    from.refuse("false, \"rope\" or \"prompt\"");
}

/// Reads a method. The manifest spells methods as the fleet file does, so the same
/// reader parses them.
config::MethodSpec read_method(const Field& from, const fs::path& folder) {
    json::object method = from.value().as_object();
    method.erase("name");
    method.erase("file");
    method.erase("constants");
    const json::object fleet{
        {"version", 1},
        {"models", json::object{{"m", json::object{{"runtime", "aoti"},
                                                   {"package", (folder / from["file"].file()).string()},
                                                   {"methods", json::object{{from["name"].text(), method}}}}}}}};
    const config::ReadFleet read = config::read_fleet_text(json::serialize(fleet), folder / "manifest.json");
    if (!read.ok() || read.fleet.models.size() != 1 || read.fleet.models.front().methods.size() != 1)
        throw ErrorException{
            {ErrorCode::package_incompatible,
             fmt::format("reading method {} of {}: {}", from["name"].text(), (folder / "manifest.json").string(),
                         read.ok() ? "no method" : read.diagnostics.front().text()),
             std::string{export_again}}};
    return read.fleet.models.front().methods.front();
}

void read_draw(const Field& root, Manifest& manifest) {
    DrawRules& draw = manifest.draw;
    Shape& shape = manifest.shape;
    draw.codebooks = shape.codebooks;
    draw.vocabulary = shape.vocabulary;
    draw.guided = shape.rows == 2;
    shape.sampling = root["sampling"].object();
    const Field order = root["sampling_order"];
    draw.min_p_before_top_p = order.text() == "t3";
    if (!draw.min_p_before_top_p && order.text() != "hf") order.refuse("\"hf\" or \"t3\"");
    const auto delay = root.find("delay_pattern");
    if (!delay) return;
    draw.delay_pattern = true;
    draw.delay_bos = static_cast<std::int32_t>((*delay)["bos"].integer(0, shape.vocabulary - 1));
    draw.delay_eos = static_cast<std::int32_t>((*delay)["eos"].integer(0, shape.vocabulary - 1));
    if (const auto ras = delay->find("ras")) {
        shape.ras_window = draw.ras_window = (*ras)["window"].count(limits::ras_window_max);
        shape.sampling.emplace("ras_repeats", (*ras)["repeats"].count(limits::ras_window_max));
    }
}

/// Members of a manifest, as clients/python/bulkhead/export/manifest.py lists them; those that may
/// be null; and those that older exporters omit. Each value is checked when it is read.
constexpr std::string_view required =
    "format family name exporter torch device cpu_flags dtypes vocabulary codebooks rows length length_max slots "
    "slots_max kv buckets decode stop rope_delta sampling methods constants weights tokenizer sampling_order source";
constexpr std::string_view nullable = "compute_capability first_token bos delay_pattern prefill";
constexpr std::string_view optional = "functions";

void check_members(const Field& root) {
    std::set<std::string_view> known{optional};
    for (const auto& [names, may_be_null] : {std::pair{required, false}, std::pair{nullable, true}})
        for (const auto& word : std::views::split(names, ' ')) {
            const std::string_view name = *known.emplace(word.begin(), word.end()).first;
            if (may_be_null ? !root.object().contains(name) : !root.find(name)) (void)root[name];
        }
    for (const auto& member : root.object())
        if (!known.contains(std::string_view{member.key()})) root.unknown(member.key());
}

/// Checks that each number of sequences up to `slots_max` has a function.
void check_decode(const Field& root, const Manifest& manifest) {
    for (std::uint32_t n = 1; n <= manifest.slots_max; ++n)
        if (std::ranges::none_of(manifest.decode, [n](const Manifest::Decode& decode) {
                return n >= decode.sequences_min && n <= decode.sequences_max;
            }))
            root["decode"].refuse(fmt::format("a list with a function for {} sequences", n));
}

Manifest read_document(const json::value& document, const fs::path& folder) {
    const Field root{document, "", folder};
    Manifest manifest;
    if (const Field format = root["format"]; format.text() != "bulkhead-generate/1")
        format.refuse("\"bulkhead-generate/1\", the format that this version reads");
    check_members(root);
    (void)root["exporter"].text();
    (void)root["source"].object();
    for (const Field& file : root["tokenizer"].items()) (void)file.file();
    (void)root["family"].text();
    (void)root["name"].text();
    manifest.device = root["device"].text();
    if (manifest.device != "cpu" && manifest.device != "cuda") root["device"].refuse("\"cpu\" or \"cuda\"");
    auto& facts = manifest.compiled.metadata;
    facts["AOTI_DEVICE_KEY"] = manifest.device;
    facts["BULKHEAD_TORCH"] = root["torch"].text();
    if (const auto capability = root.find("compute_capability")) facts["AOTI_COMPUTE_CAPABILITY"] = capability->text();
    for (const Field& flag : root["cpu_flags"].items()) facts["BULKHEAD_CPU_FLAGS"] += flag.text() + " ";
    manifest.weights_dtype = root["dtypes"]["weights"].dtype();
    manifest.kv_dtype = root["dtypes"]["kv"].dtype();
    if (!is_floating(manifest.kv_dtype)) root["dtypes"]["kv"].refuse("float32, float16 or bfloat16");

    Shape& shape = manifest.shape;
    shape.vocabulary = root["vocabulary"].count(limits::vocabulary_max);
    shape.codebooks = root["codebooks"].count(limits::codebooks_max);
    shape.rows = root["rows"].count(2);
    manifest.length_max = root["length_max"].count(limits::length_max, 3);
    shape.length = root["length"].count(manifest.length_max, 3);
    manifest.slots_max = root["slots_max"].count(limits::slots_max);
    shape.slots = root["slots"].count(manifest.slots_max);
    for (const Field& bucket : root["buckets"].items()) shape.buckets.push_back(bucket.count(manifest.length_max, 2));
    std::ranges::sort(shape.buckets);
    const Field kv = root["kv"];
    manifest.layers = kv["layers"].count(limits::layers_max);
    manifest.heads = kv["heads"].count(limits::width_max);
    manifest.dim = kv["dim"].count(limits::width_max);

    if (const auto prefill = root.find("prefill")) read_prefill(*prefill, manifest);
    for (const Field& item : root["decode"].items()) {
        const auto range = item["sequences"].items();
        if (range.size() != 2) item["sequences"].refuse("a range [least, most]");
        Manifest::Decode decode{item["file"].file(), range[0].count(limits::slots_max), 1};
        decode.sequences_max = range[1].count(limits::slots_max, decode.sequences_min);
        manifest.decode.push_back(std::move(decode));
    }
    if (manifest.decode.empty()) root["decode"].refuse("a list of at least one function");
    check_decode(root, manifest);
    manifest.rope_delta = read_rope_delta(root["rope_delta"]);

    if (const auto first = root.find("first_token")) {
        shape.first_token = first->tokens(shape.vocabulary);
        if (shape.first_token.size() != shape.codebooks) first->refuse("one token id for each codebook");
    }
    shape.stop = root["stop"].tokens(shape.vocabulary);
    read_draw(root, manifest);
    for (const Field& item : root["methods"].items())
        manifest.methods.push_back({item["file"].file(), read_method(item, folder)});

    const Field weights = root["weights"];
    manifest.weights_file = weights["file"].file();
    manifest.weights_bytes =
        static_cast<std::uint64_t>(weights["bytes"].integer(8, std::numeric_limits<std::int64_t>::max()));
    if (const auto hash = weights.find("sha256")) manifest.sha256[manifest.weights_file] = hash->sha256();
    if (const auto functions = root.find("functions"))
        for (const auto& function : functions->object())
            manifest.sha256[function.key()] = (*functions)[function.key()].sha256();
    const Field constants = root["constants"];
    for (const auto& file : constants.object()) {
        const Field names = constants[file.key()];
        for (const auto& name : names.object()) manifest.constants[file.key()][name.key()] = names[name.key()].text();
    }
    return manifest;
}

Error exceeds(std::string_view what, std::uint32_t asked, std::uint32_t exported) {
    return {ErrorCode::config_invalid,
            fmt::format("settling `generate`: {} {} are asked for, the package was exported for at most {}", asked,
                        what, exported),
            fmt::format("lower it in the fleet file, or {} with more", export_again)};
}

/// GPU_ALIGN_BYTES of torch/_inductor/utils.py.
constexpr std::uint64_t aligned_bytes = 16;

/// Checks that each slot's KV starts at a multiple of 16 bytes. AOTInductor copies other tensors
/// for its kernels on a GPU, and what they write to the copy is lost.
Result<> check_slots_aligned(const Manifest& manifest) {
    const Shape& shape = manifest.shape;
    const std::uint64_t position = std::uint64_t{shape.rows} * manifest.heads * manifest.dim *
                                   // Of one layer's keys, or values.
                                   element_size(manifest.kv_dtype);
    const std::uint64_t slot = position * shape.length;
    if (shape.slots == 1 || slot % aligned_bytes == 0) return {};

    const std::uint64_t step = aligned_bytes / std::gcd(position, aligned_bytes);
    const std::uint64_t below = shape.length / step * step;
    std::vector<std::string> ways;
    if (below > 0) ways.push_back(fmt::format("generate.length: {}", below));
    if (below + step <= manifest.length_max) ways.push_back(fmt::format("generate.length: {}", below + step));
    ways.emplace_back("generate.slots: 1");
    return Error{ErrorCode::config_invalid,
                 fmt::format("laying out KV: a layer's keys of a slot take {} bytes ({} positions of {}), and the next "
                             "slot's must begin at a multiple of {}",
                             slot, shape.length, position, aligned_bytes),
                 fmt::format("what would fit: {}", fmt::join(ways, ", or "))};
}

/// The prompt's tensors, as requests send them.
std::vector<config::TensorSpec> prompt_inputs(const Manifest& manifest) {
    const Shape& shape = manifest.shape;
    const config::DimRange along{1, shape.length, "T"};
    const auto fixed = [](std::int64_t size) { return config::DimRange{size, size, ""}; };
    std::vector<config::TensorSpec> inputs;
    if (shape.embeddings) {
        inputs.push_back({"embeddings",
                          manifest.prefill->embeddings_dtype,
                          {fixed(shape.rows), along, fixed(manifest.prefill->width)}});
    } else {
        inputs.push_back({"tokens", wire::DType::int64, {along}});
        if (shape.codebooks > 1) inputs.back().shape.push_back(fixed(shape.codebooks));
    }
    if (manifest.prefill)
        for (const Manifest::Extra& extra : manifest.prefill->extras) {
            config::TensorSpec spec{extra.name, extra.dtype, {}};
            for (const std::int64_t dim : extra.dims)
                spec.shape.push_back(dim == Manifest::prompt_dim ? along : fixed(dim));
            inputs.push_back(std::move(spec));
        }
    if (manifest.rope_delta == Manifest::RopeDelta::rope)
        inputs.push_back({"rope", wire::DType::int64, {fixed(3), along}});
    return inputs;
}

}  // namespace

std::uint64_t Manifest::kv_bytes_per_position() const {
    return std::uint64_t{2} * layers * shape.rows * heads * dim * element_size(kv_dtype);
}

Result<Manifest> read_manifest_of(const fs::path& folder) {
    const fs::path path = folder / "manifest.json";
    std::error_code error;
    if (!fs::is_regular_file(path, error))
        return Error{
            ErrorCode::load_failed, fmt::format("opening {}: it is missing, or no file", path.string()),
            fmt::format("`package` names a folder that {} writes; {}", "python -m bulkhead.export", export_again)};
    if (const auto bytes = fs::file_size(path, error); error || bytes > limits::manifest_bytes_max)
        return Error{ErrorCode::load_failed, fmt::format("reading {}: it has {} bytes", path.string(), bytes),
                     std::string{export_again}};
    std::ifstream stream{path, std::ios::binary};
    std::ostringstream text;
    text << stream.rdbuf();
    if (!stream)
        return Error{ErrorCode::load_failed, fmt::format("reading {}", path.string()), "check its permissions"};
    boost::system::error_code wrong;
    const json::value document = json::parse(text.str(), wrong);
    if (wrong)
        return Error{ErrorCode::package_incompatible, fmt::format("reading {}: {}", path.string(), wrong.message()),
                     std::string{export_again}};
    try {
        return read_document(document, folder);
    } catch (const ErrorException& told) {
        return told.error();
    }
}

Result<> settle(Manifest& manifest, const config::GenerateSpec& chosen) {
    Shape& shape = manifest.shape;
    shape.slots = chosen.slots.value_or(shape.slots);
    if (shape.slots > manifest.slots_max) return exceeds("slots", shape.slots, manifest.slots_max);
    shape.length = chosen.length.value_or(shape.length);
    if (shape.length > manifest.length_max) return exceeds("positions", shape.length, manifest.length_max);
    if (manifest.device == "cuda")
        if (auto aligned = check_slots_aligned(manifest); !aligned) return aligned;
    shape.chunk_max = manifest.prefill ? std::min(manifest.prefill->chunk_max, shape.length) : shape.length;
    if (!chosen.buckets.empty()) shape.buckets = chosen.buckets;
    std::erase_if(shape.buckets, [&](std::uint32_t bucket) { return bucket > shape.length; });
    if (shape.buckets.empty() || shape.buckets.back() < shape.length) shape.buckets.push_back(shape.length);
    if (manifest.device == "cpu") shape.buckets.clear();
    shape.inputs = prompt_inputs(manifest);
    return {};
}

}  // namespace bulkhead::worker::generation
