#include "config/model_reader.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <system_error>

#include "config/limits.h"

namespace bulkhead::config {
namespace {

void check_channel(const Value& map, const ChannelLimits& channel) {
    for (const auto& [key, bound] :
         {std::pair{key::max, channel.bytes_max}, std::pair{key::worker_max, channel.worker_bytes_max}})
        if (channel.input_bytes + channel.output_bytes > bound)
            map.refuse(fmt::format("{}: input {} + output {} bytes exceed {} {}", map.what(), channel.input_bytes,
                                   channel.output_bytes, key, bound),
                       fmt::format("raise {}, or lower input and output", key));
}

/// Reads each key that is present. Reports an unreadable value and leaves its member unchanged.
struct KeyReader {
    Fields& fields;

    void operator()(std::string_view key, rule::Ignored ignored) const { fields.ignore(key, ignored.remedy); }
    void operator()(std::string_view key, auto& to, auto rule) const;
};

void read(const Value& value, auto& to, rule::Integer bounds) {
    if (const auto number = value.integer(bounds.min, bounds.max)) to = static_cast<std::uint32_t>(*number);
}
void read(const Value& value, auto& to, rule::Size bounds) { assign(value.size(bounds.min, bounds.max), to); }
void read(const Value& value, auto& to, rule::Duration) { assign(value.duration(), to); }
void read(const Value& value, std::optional<std::chrono::milliseconds>& to, rule::KeepAlive) {
    const bool is_scalar = value.node().kind == Node::Kind::scalar;
    const std::string& text = value.node().text;
    if (is_scalar && text == "forever")
        to.reset();
    else if (is_scalar && text == "0")
        to = std::chrono::milliseconds{0};
    else if (const auto time = is_scalar ? parse_duration(text) : std::nullopt)
        to = time;
    else
        value.refuse("write forever, 0, or a whole number and a unit, such as 30s or 10m; at most 24h");
}
void read(const Value& value, auto& to, rule::Boolean) { assign(value.boolean(), to); }
void read(const Value& value, auto& to, rule::Enumeration) { value.word(to); }
void read(const Value& value, std::vector<std::uint32_t>& to, rule::Lengths bounds) {
    for (const Value& item : value.items(bounds.count_max))
        if (const auto number = item.integer(bounds.min, bounds.max)) to.push_back(static_cast<std::uint32_t>(*number));
    const auto falls = std::ranges::adjacent_find(to, std::greater_equal<>{});
    if (falls != to.end())
        value.refuse(fmt::format("{}: {} stands before {}", value.what(), *falls, *std::next(falls)),
                     "name each attention length once, the smallest first");
}

template <typename Struct>
void read(const Value& value, Struct& to, rule::Group) {
    Fields fields{value, value.what() + "."};
    Struct::keys(to, KeyReader{fields});
    fields.finish();
    if constexpr (std::is_same_v<Struct, ChannelLimits>) check_channel(value, to);
}

void read(const Value& map, ModelSpec& model, rule::Environment) {
    auto& environment = model.environment;
    const Fields fields{map, map.what() + "."};
    for (const Fields::Member& member : fields.members()) {
        const bool is_name = is_environment_name(member.key);
        // The daemon sets these: a model that set them would break its isolation.
        const bool is_reserved = member.key.starts_with("BULKHEAD_") || member.key == "CUDA_VISIBLE_DEVICES";
        if (is_name && !is_reserved)
            assign(member.value.raw_text(), environment[member.key]);
        else
            map.report().add(member.location, fmt::format("{}: variable {}", map.what(), in_quotes(member.key)),
                             is_name ? "remove it: the daemon sets this one itself; choose a GPU by `device`"
                                     : "a variable's name has A-Z a-z 0-9 _ and begins with no digit");
    }
    std::size_t bytes = 0;
    for (const auto& [name, value] : environment) bytes += name.size() + value.size() + 2;
    if (bytes > limits::environment_bytes_max)
        map.refuse(fmt::format("{} has {} bytes", map.what(), bytes),
                   fmt::format("at most {} bytes, names and values together", limits::environment_bytes_max));
}

constexpr std::size_t devices_max = 16;

std::optional<std::string> read_device_name(const Value& value, bool may_be_auto) {
    auto device = value.text();
    if (device && is_device(*device) && (may_be_auto || *device != "auto")) return device;
    if (device)
        value.refuse(fmt::format("write {}cpu, cuda:N, or a GPU's UUID as GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx",
                                 may_be_auto ? "auto, " : ""));
    return std::nullopt;
}

void read(const Value& value, ModelSpec& model, rule::Device) {
    model.other_devices.clear();  // inherited from the defaults
    if (value.node().kind != Node::Kind::sequence) {
        assign(read_device_name(value, true), model.device);
        return;
    }
    std::vector<std::string> devices;
    for (const Value& item : value.items(devices_max)) {
        auto device = read_device_name(item, false);
        if (device && std::ranges::find(devices, *device) != devices.end())
            item.refuse("name it once");
        else if (device)
            devices.push_back(std::move(*device));
    }
    if (value.node().items.empty()) value.refuse(value.what() + " is empty", "name a device, or write auto");
    if (devices.empty()) return;
    model.device = devices.front();
    model.other_devices.assign(devices.begin() + 1, devices.end());
}

void read(const Value& value, ModelSpec& model, rule::Preload) {
    const Node& node = value.node();
    model.near = node.kind == Node::Kind::scalar && node.text == "near";
    const auto is_loaded = node.is_plain ? parse_boolean(node.text) : std::nullopt;
    if (!model.near && !is_loaded) value.refuse("write true, false or near");
    model.preload = is_loaded.value_or(false);
}

void read(const Value& value, ModelSpec& model, rule::Replicas) {
    constexpr rule::Integer bounds{1, 8};
    if (value.node().kind != Node::Kind::map) {
        read(value, model.replicas, bounds);
        model.replicas_min = model.replicas;
        return;
    }
    Fields fields{value, value.what() + "."};
    model.replicas = model.replicas_min = 1;
    if (const auto min = fields.take(key::min)) read(*min, model.replicas_min, bounds);
    model.replicas = model.replicas_min;
    if (const auto max = fields.take(key::max)) read(*max, model.replicas, bounds);
    fields.finish();
    if (model.replicas < model.replicas_min)
        value.refuse(fmt::format("{}: min {} exceeds max {}", value.what(), model.replicas_min, model.replicas),
                     "raise max, or lower min");
}

void read(const Value& map, ModelSpec& model, rule::ModelGroup) {
    Fields fields{map, map.what() + "."};
    ModelGroup group;
    if (const auto value = fields.require(key::name, "add name: what the members of the group name alike"))
        if (auto name = value->text()) {
            if (!is_model_name(*name)) value->refuse("write 1 to 63 of A-Z a-z 0-9 . _ - , a letter or digit first");
            group.name = std::move(*name);
        }
    if (const auto value = fields.require(key::kind, "add kind: exclusive or together")) value->word(group.kind);
    fields.finish();
    model.group = std::move(group);
}

void read(const Value& map, ModelSpec& model, rule::State) {
    Fields fields{map, map.what() + "."};
    if (const auto value = fields.require(key::scope, "add scope: channel")) value->word(model.state);
    if (const auto value = fields.take(key::reset)) assign(value->text(), model.reset_method);
    fields.finish();
    if (model.state == StateScope::channel && !fields.has(key::reset))
        map.refuse(fmt::format("{}: missing key \"reset\"", map.what()),
                   "name the method that is called between channels, such as reset_states");
    else if (!model.reset_method.empty() && !is_method_name(model.reset_method))
        map.refuse(fmt::format("{}.reset = {}", map.what(), in_quotes(model.reset_method)),
                   "name a method of the model");
}

void KeyReader::operator()(std::string_view key, auto& to, auto rule) const {
    if (const auto value = fields.take(key)) read(*value, to, rule);
}

/// Relative to the fleet file's folder. Keeps symlinks: a venv's interpreter finds its venv through
/// its own symlink.
std::optional<std::filesystem::path> read_path(const Value& value, const std::string& text,
                                               const std::filesystem::path& folder, FileCheck check,
                                               bool is_folder = false) {
    std::filesystem::path path = (folder / text).lexically_normal();
    if (is_folder && !path.has_filename()) path = path.parent_path();  // the text ended in a slash
    if (check == FileCheck::none) return path;
    std::error_code failure;
    const auto status = std::filesystem::status(is_folder ? path / "manifest.json" : path, failure);
    if (status.type() == std::filesystem::file_type::regular) return path;
    if (is_folder && status.type() == std::filesystem::file_type::not_found)
        value.refuse(
            fmt::format("{}: {} holds no manifest.json", value.what(), in_quotes(path.string())),
            "name the folder that `python -m bulkhead.export` wrote; a relative path is taken from the folder of "
            "the fleet file");
    else if (status.type() == std::filesystem::file_type::not_found)
        value.refuse(fmt::format("{}: no file {}", value.what(), in_quotes(path.string())),
                     "correct the path; a relative one is taken from the folder of the fleet file");
    else if (failure)
        value.refuse(fmt::format("{}: {}: {}", value.what(), in_quotes(path.string()), failure.message()),
                     "check owner and mode of the file and of the folders above it");
    else
        value.refuse(fmt::format("{}: {} is not a regular file", value.what(), in_quotes(path.string())),
                     "name a file");
    return std::nullopt;
}

void read_runtime_and_file(Fields& fields, const std::string& where, const std::filesystem::path& folder,
                           FileCheck check, ModelSpec& model) {
    const auto runtime = fields.require(key::runtime, "add runtime: torchscript, aoti, generate or python");
    const auto file = fields.take(key::file);
    const auto package = fields.take(key::package);
    if (!runtime || !runtime->word(model.runtime)) {
        if (!file && !package)
            fields.report().add(fields.location(), fmt::format("{}missing key \"file\" or \"package\"", where),
                                "add file: for runtime torchscript, package: for runtimes aoti and generate");
        return;
    }
    if (model.runtime == Runtime::python) return;  // read below
    const bool is_package = model.runtime != Runtime::torchscript;
    const bool is_folder = model.runtime == Runtime::generate;
    const auto& wanted = is_package ? package : file;
    const auto& surplus = is_package ? file : package;
    const std::string_view wanted_key = is_package ? key::package : key::file;
    if (surplus)
        surplus->report().add(*fields.location_of(is_package ? key::file : key::package), surplus->what(),
                              fmt::format("runtime {} has its model under \"{}\"", word_of(model.runtime), wanted_key));
    else if (!wanted)
        runtime->report().add(fields.location(), fmt::format("{}missing key \"{}\"", where, wanted_key),
                              fmt::format("add {}: the path of the {}", wanted_key,
                                          is_folder    ? "package's folder"
                                          : is_package ? ".pt2 package"
                                                       : "TorchScript file"));
    const auto text = wanted ? wanted->text() : std::nullopt;
    if (text && text->empty()) return wanted->refuse("write the path of the model file");
    if (text) assign(read_path(*wanted, *text, folder, check, is_folder), model.file);
}

void read_methods_or_shorthand(Fields& fields, const std::string& where, ModelSpec& model) {
    const auto methods = fields.take(key::methods);
    const bool shorthand = std::ranges::any_of(method_keys, [&](std::string_view key) { return fields.has(key); });
    MethodSpec forward = read_method(fields, "forward");
    if (methods) {
        model.methods = read_methods(*methods, where);
        for (const std::string_view key : method_keys)
            if (const auto location = fields.location_of(key))
                methods->report().add(*location, fmt::format("{}\"{}\" beside \"methods\"", where, key),
                                      "move it under the method it belongs to");
    } else if (shorthand) {
        model.methods = {std::move(forward)};
    }
}

/// Refuses keys that the runtime has no use for; a state that comes from the defaults is dropped.
void refuse_keys(const Fields& fields, const std::string& where, std::initializer_list<std::string_view> keys,
                 std::string_view methods_remedy, std::string_view state_remedy, ModelSpec& model) {
    const auto refuse = [&](std::string_view key, std::string_view remedy) {
        if (const auto location = fields.location_of(key))
            fields.report().add(*location, fmt::format("{}\"{}\" of runtime {}", where, key, word_of(model.runtime)),
                                remedy);
    };
    for (const std::string_view key : keys) refuse(key, methods_remedy);
    for (const std::string_view key : method_keys) refuse(key, methods_remedy);
    if (model.state != StateScope::none) refuse(key::state, state_remedy);
    model.state = StateScope::none;
    model.methods.clear();
}

/// The package declares inputs and outputs of a generating model; each sequence starts from
/// a fresh state.
void read_generating(Fields& fields, const std::string& where, ModelSpec& model) {
    const auto generate = fields.take(key::generate);
    if (model.runtime != Runtime::generate) {
        if (generate)
            generate->report().add(*fields.location_of(key::generate), generate->what(),
                                   fmt::format("remove it: runtime {} generates nothing", word_of(model.runtime)));
        return;
    }
    if (generate) read(*generate, model.generate, rule::Group{});
    refuse_keys(fields, where, {key::methods}, "remove it: the package names its methods",
                "remove it: a slot is reset for each sequence", model);
}

/// Returns the meaning of a value in YAML's core schema.
boost::json::value meaning_of(const Node& node) {
    switch (node.kind) {
    case Node::Kind::null:
    case Node::Kind::invalid: return nullptr;
    case Node::Kind::scalar:
        if (!node.is_plain) return boost::json::string{node.text};
        if (const auto integer = parse_integer(node.text)) return *integer;
        if (const auto boolean = parse_boolean(node.text)) return *boolean;
        if (const auto number = parse_number(node.text)) return *number;
        return boost::json::string{node.text};
    case Node::Kind::sequence: {
        boost::json::array items;
        for (const NodeRef& item : node.items) items.push_back(meaning_of(*item));
        return items;
    }
    case Node::Kind::map: {
        boost::json::object members;
        for (const Node::Entry& entry : node.entries) members[entry.key] = meaning_of(*entry.value);
        return members;
    }
    }
    return nullptr;
}

void read_engine(const Value& value, const std::filesystem::path& folder, FileCheck check, ModelSpec& model) {
    const auto text = value.text();
    if (!text) return;
    const auto colon = text->rfind(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == text->size())
        return value.refuse("write module:Class, or file.py:Class for a file beside the fleet file");
    const std::string module = text->substr(0, colon);
    model.python.engine = *text;
    if (!module.ends_with(".py")) return;
    const auto file = read_path(value, module, folder, check);
    if (!file) return;
    model.file = *file;
    model.python.engine = file->string() + text->substr(colon);
}

void read_interpreter(const Value& value, const std::filesystem::path& folder, FileCheck check, ModelSpec& model) {
    const auto text = value.text();
    if (!text) return;
    if (text->empty()) return value.refuse("write the path of a Python, such as ../venv/bin/python");
    assign(read_path(value, *text, folder, check), model.python.interpreter);
}

void read_options(const Value& value, ModelSpec& model) {
    const Fields fields{value, value.what() + "."};
    if (!fields.is_map()) return;
    model.python.options = std::move(meaning_of(value.node()).as_object());
    const auto bytes = boost::json::serialize(model.python.options).size();
    if (bytes > limits::options_bytes_max)
        value.refuse(
            fmt::format("{} has {} bytes", value.what(), bytes),
            fmt::format("at most {} bytes as JSON: put what is larger into a file", limits::options_bytes_max));
}

/// An engine declares its methods itself.
void read_python(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                 ModelSpec& model) {
    if (model.runtime != Runtime::python) {
        for (const std::string_view key : {key::engine, key::interpreter, key::options})
            if (fields.take(key))
                fields.report().add(*fields.location_of(key),
                                    fmt::format("{}\"{}\" of runtime {}", where, key, word_of(model.runtime)),
                                    "remove it: it belongs to runtime python");
        return;
    }
    if (const auto engine = fields.require(key::engine, "add engine: module:Class"))
        read_engine(*engine, folder, check, model);
    if (const auto interpreter = fields.take(key::interpreter)) read_interpreter(*interpreter, folder, check, model);
    if (const auto options = fields.take(key::options)) read_options(*options, model);
    refuse_keys(fields, where, {key::file, key::package, key::methods},
                "remove it: the engine's class declares its methods", "remove it: an engine keeps its state itself",
                model);
}

}  // namespace

void read_settings(Fields& fields, const std::string& where, ModelSpec& model) {
    ModelSettings::keys(model, KeyReader{fields});
    if (model.graphs == Graphs::required && model.device == "cpu" &&
        (fields.has(key::graphs) || fields.has(key::device)))
        fields.take(fields.has(key::graphs) ? key::graphs : key::device)
            ->refuse(fmt::format("{}graphs = required on device cpu", where),
                     "a CPU has no CUDA Graphs: write preferred or off, or choose a GPU");
}

void read_model(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                ModelSpec& model) {
    read_runtime_and_file(fields, where, folder, check, model);
    read_settings(fields, where, model);
    read_methods_or_shorthand(fields, where, model);
    read_generating(fields, where, model);
    read_python(fields, where, folder, check, model);
    fields.finish();
}

}  // namespace bulkhead::config
