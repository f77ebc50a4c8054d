#include "config/model_reader.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <system_error>

#include "config/limits.h"
#include "config/method_reader.h"

namespace bulkhead::config {
namespace {

template <typename T>
void assign(std::optional<T> value, T& to) {
    if (value) to = std::move(*value);
}

/// A key of former releases.
void ignore(Fields& fields, std::string_view key, const std::string& where, std::string remedy) {
    if (fields.take(key))
        fields.report().warn(*fields.place_of(key), fmt::format("{}{} has no effect any more", where, in_quotes(key)),
                             std::move(remedy));
}

void read_deadlines(const Value& map, Deadlines& deadlines) {
    Fields fields{map, map.what() + "."};
    if (const auto value = fields.take("load")) assign(value->duration(), deadlines.load);
    if (const auto value = fields.take("capture")) assign(value->duration(), deadlines.capture);
    if (const auto value = fields.take("request")) assign(value->duration(), deadlines.request);
    if (const auto value = fields.take("drain")) assign(value->duration(), deadlines.drain);
    if (const auto value = fields.take("kill")) assign(value->duration(), deadlines.kill);
    fields.finish();
}

void read_channel(const Value& map, ChannelLimits& channel) {
    Fields fields{map, map.what() + "."};
    const auto slab = [&](std::string_view key, std::uint64_t& to) {
        if (const auto value = fields.take(key))
            assign(value->size(limits::slab_bytes_min, limits::slab_bytes_max), to);
    };
    slab("input", channel.input_bytes);
    slab("output", channel.output_bytes);
    slab("max", channel.bytes_max);
    if (const auto value = fields.take("count"))
        if (const auto count = value->integer(1, limits::channels_max))
            channel.channels_max = static_cast<std::uint32_t>(*count);
    slab("worker_max", channel.worker_bytes_max);
    if (const auto value = fields.take("idle")) assign(value->duration(), channel.idle);
    if (const auto value = fields.take("huge_pages")) assign(value->boolean(), channel.huge_pages);
    ignore(fields, "spin_us", map.what() + ": ", "remove it: both sides sleep until they are woken");
    fields.finish();
    if (channel.input_bytes + channel.output_bytes > channel.bytes_max)
        map.refuse(fmt::format("{}: input {} + output {} bytes exceed max {}", map.what(), channel.input_bytes,
                               channel.output_bytes, channel.bytes_max),
                   "raise max, or lower input and output");
    if (channel.input_bytes + channel.output_bytes > channel.worker_bytes_max)
        map.refuse(fmt::format("{}: input {} + output {} bytes exceed worker_max {}", map.what(), channel.input_bytes,
                               channel.output_bytes, channel.worker_bytes_max),
                   "raise worker_max, or lower input and output");
}

/// The daemon's own variables: a model that set them would break its isolation.
bool is_reserved_variable(std::string_view name) {
    return name.starts_with("BULKHEAD_") || name == "CUDA_VISIBLE_DEVICES";
}

void read_environment(const Value& map, std::map<std::string, std::string>& environment) {
    const Fields fields{map, map.what() + "."};
    for (const Fields::Member& member : fields.members()) {
        Report& report = member.value.report();
        if (!is_environment_name(member.key))
            report.add(member.place, fmt::format("{}: variable {}", map.what(), in_quotes(member.key)),
                       "a variable's name has A-Z a-z 0-9 _ and begins with no digit");
        else if (is_reserved_variable(member.key))
            report.add(member.place, fmt::format("{}: variable {}", map.what(), in_quotes(member.key)),
                       "remove it: the daemon sets this one itself; choose a GPU by `device`");
        else
            assign(member.value.raw_text(), environment[member.key]);
    }
    std::size_t bytes = 0;
    for (const auto& [name, value] : environment) bytes += name.size() + value.size() + 2;
    if (bytes > limits::environment_bytes_max)
        map.refuse(fmt::format("{} has {} bytes", map.what(), bytes),
                   fmt::format("at most {} bytes, names and values together", limits::environment_bytes_max));
}

void read_state(const Value& map, ModelSpec& model) {
    Fields fields{map, map.what() + "."};
    if (const auto value = fields.require("scope", "add scope: channel")) value->word(scope_words, model.state);
    if (const auto value = fields.take("reset")) assign(value->text(), model.reset_method);
    fields.finish();
    if (model.state == StateScope::channel && !fields.has("reset"))
        map.refuse(fmt::format("{}: missing key \"reset\"", map.what()),
                   "name the method that is called between channels, such as reset_states");
    else if (!model.reset_method.empty() && !is_method_name(model.reset_method))
        map.refuse(fmt::format("{}.reset = {}", map.what(), in_quotes(model.reset_method)),
                   "name a method of the model");
}

void read_generate(const Value& map, GenerateSpec& generate) {
    Fields fields{map, map.what() + "."};
    const auto number = [&](std::string_view key, std::int64_t min, std::int64_t max) -> std::optional<std::uint32_t> {
        const auto value = fields.take(key);
        const auto read = value ? value->integer(min, max) : std::nullopt;
        return read ? std::optional{static_cast<std::uint32_t>(*read)} : std::nullopt;
    };
    generate.slots = number("slots", 1, limits::slots_max);
    generate.length = number("length", 3, limits::length_max);
    assign(number("prefill_chunk", 1, limits::prefill_chunk_max), generate.prefill_chunk);
    if (const auto value = fields.take("buckets")) {
        for (const Value& item : value->items(limits::buckets_max))
            if (const auto length = item.integer(2, limits::length_max))
                generate.buckets.push_back(static_cast<std::uint32_t>(*length));
        const auto falls = std::adjacent_find(generate.buckets.begin(), generate.buckets.end(), std::greater_equal<>{});
        if (falls != generate.buckets.end())
            value->refuse(fmt::format("{}: {} stands before {}", value->what(), *falls, *std::next(falls)),
                          "name each attention length once, the smallest first");
    }
    fields.finish();
}

std::optional<std::filesystem::path> read_path(const Value& value, const std::filesystem::path& folder,
                                               FileCheck check, bool is_folder) {
    const auto text = value.text();
    if (!text) return std::nullopt;
    if (text->empty()) {
        value.refuse("write the path of the model file");
        return std::nullopt;
    }
    std::filesystem::path path = (folder / *text).lexically_normal();
    if (is_folder && !path.has_filename()) path = path.parent_path();  // it ended in a slash
    if (check == FileCheck::none) return path;
    std::error_code failure;
    const auto status = std::filesystem::status(is_folder ? path / "manifest.json" : path, failure);
    if (status.type() == std::filesystem::file_type::regular) return path;
    if (is_folder && status.type() == std::filesystem::file_type::not_found)
        value.refuse(fmt::format("{}: {} holds no manifest.json", value.what(), in_quotes(path.string())),
                     "name the folder that `python -m bulkhead.export` wrote; a relative path is taken from the folder of "
                     "the fleet file");
    else if (status.type() == std::filesystem::file_type::not_found)
        value.refuse(fmt::format("{}: no file {}", value.what(), in_quotes(path.string())),
                     "correct the path; a relative one is taken from the folder of the fleet file");
    else if (failure)
        value.refuse(fmt::format("{}: {}: {}", value.what(), in_quotes(path.string()), failure.message()),
                     "check owner and mode of the file and of the folders above it");
    else
        value.refuse(fmt::format("{}: {} is no regular file", value.what(), in_quotes(path.string())), "name a file");
    return std::nullopt;
}

void read_runtime_and_file(Fields& fields, const std::string& where, const std::filesystem::path& folder,
                           FileCheck check, ModelSpec& model) {
    const auto runtime = fields.require("runtime", "add runtime: torchscript, aoti or generate");
    const auto file = fields.take("file");
    const auto package = fields.take("package");
    if (!runtime || !runtime->word(runtime_words, model.runtime)) {
        if (!file && !package)
            fields.report().add(fields.place(), fmt::format("{}missing key \"file\" or \"package\"", where),
                                "add file: for runtime torchscript, package: for runtimes aoti and generate");
        return;
    }
    const bool is_package = model.runtime != Runtime::torchscript;
    const bool is_folder = model.runtime == Runtime::generate;
    const auto& wanted = is_package ? package : file;
    const auto& surplus = is_package ? file : package;
    const std::string_view wanted_key = is_package ? "package" : "file";
    if (surplus)
        surplus->report().add(
            *fields.place_of(is_package ? "file" : "package"), surplus->what(),
            fmt::format("runtime {} has its model under \"{}\"", word_of(runtime_words, model.runtime), wanted_key));
    else if (!wanted)
        runtime->report().add(
            fields.place(), fmt::format("{}missing key \"{}\"", where, wanted_key),
            fmt::format("add {}: the path of the {}", wanted_key,
                        is_folder ? "package's folder" : is_package ? ".pt2 package" : "TorchScript file"));
    if (wanted)
        if (const auto path = read_path(*wanted, folder, check, is_folder)) model.file = *path;
}

void read_methods_or_shorthand(Fields& fields, const std::string& where, ModelSpec& model) {
    const auto methods = fields.take("methods");
    const bool shorthand =
        std::any_of(method_keys.begin(), method_keys.end(), [&](std::string_view key) { return fields.has(key); });
    MethodSpec forward = read_method(fields, "forward", where);
    if (methods) {
        model.methods = read_methods(*methods, where);
        for (const std::string_view key : method_keys)
            if (const auto place = fields.place_of(key))
                methods->report().add(*place, fmt::format("{}\"{}\" beside \"methods\"", where, key),
                                      "move it under the method it belongs to");
    } else if (shorthand) {
        model.methods = {std::move(forward)};
    }
}

/// What a generating model takes and gives is said in its package, and its sequences begin anew by themselves.
void read_generating(Fields& fields, const std::string& where, ModelSpec& model) {
    const auto generate = fields.take("generate");
    if (model.runtime != Runtime::generate) {
        if (generate)
            generate->report().add(*fields.place_of("generate"), generate->what(),
                                   fmt::format("remove it: runtime {} generates nothing",
                                               word_of(runtime_words, model.runtime)));
        return;
    }
    if (generate) read_generate(*generate, model.generate);
    const auto refuse = [&](std::string_view key, std::string_view remedy) {
        if (const auto place = fields.place_of(key))
            fields.report().add(*place, fmt::format("{}\"{}\" of runtime generate", where, key), std::string{remedy});
    };
    refuse("methods", "remove it: the package names its methods");
    for (const std::string_view key : method_keys) refuse(key, "remove it: the package names its methods");
    if (model.state != StateScope::none) refuse("state", "remove it: a slot is reset for each sequence");
    model.state = StateScope::none;  // also where the defaults say otherwise
    model.methods.clear();
}

}  // namespace

void read_settings(Fields& fields, const std::string& where, ModelSpec& model) {
    const auto number = [&](std::string_view key, std::int64_t min, std::int64_t max, std::uint32_t& to) {
        if (const auto value = fields.take(key))
            if (const auto read = value->integer(min, max)) to = static_cast<std::uint32_t>(*read);
    };
    if (const auto value = fields.take("device"))
        if (auto device = value->text()) {
            if (is_device(*device))
                model.device = *device;
            else
                value->refuse("write auto, cpu, cuda:N, or a GPU's UUID as GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx");
        }
    number("replicas", 1, limits::replicas_max, model.replicas);
    if (const auto value = fields.take("preload")) assign(value->boolean(), model.preload);
    number("threads", 0, limits::threads_max, model.threads);
    const auto graphs = fields.take("graphs");
    if (graphs) graphs->word(graphs_words, model.graphs);
    ignore(fields, "graph_slabs", where,
           "remove it: a request under a CUDA Graph has one copy in and one out, within the GPU");
    if (const auto value = fields.take("deadlines")) read_deadlines(*value, model.deadlines);
    if (const auto value = fields.take("watchdog")) assign(value->duration(), model.watchdog);
    number("queue", 1, limits::queue_max, model.queue_bound);
    if (const auto value = fields.take("channel")) read_channel(*value, model.channel);
    if (const auto value = fields.take("environment")) read_environment(*value, model.environment);
    if (const auto value = fields.take("restart")) value->word(restart_words, model.restart);
    if (const auto value = fields.take("log_level")) value->word(log_level_words, model.log_level);
    if (const auto value = fields.take("core_dump"))
        assign(value->size(0, limits::core_bytes_max), model.core_bytes_max);
    if (const auto value = fields.take("state")) read_state(*value, model);

    if (model.graphs == Graphs::required && model.device == "cpu" && (graphs || fields.has("device"))) {
        const auto at = graphs ? graphs : fields.take("device");
        at->refuse(fmt::format("{}graphs = required on device cpu", where),
                   "a CPU has no CUDA Graphs: write preferred or off, or choose a GPU");
    }
}

void read_model(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                ModelSpec& model) {
    read_runtime_and_file(fields, where, folder, check, model);
    read_settings(fields, where, model);
    read_methods_or_shorthand(fields, where, model);
    read_generating(fields, where, model);
    fields.finish();
}

}  // namespace bulkhead::config
