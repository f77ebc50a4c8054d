#include "config/reader.h"

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "config/limits.h"
#include "config/model_reader.h"
#include "config/yaml_tree.h"

namespace bulkhead::config {
namespace {

void read_models(const Value& map, const ModelSpec& defaults, FileCheck check, Fleet& fleet) {
    const Fields fields{map, ""};
    if (fields.is_map() && map.node().entries.empty())
        map.refuse("models is empty", "declare a model: a name, and under it runtime and file");
    const std::filesystem::path folder = fleet.source.parent_path();
    std::int64_t workers = 0;
    for (const Fields::Member& member : fields.members()) {
        const std::string where = fmt::format("model {}: ", in_quotes(member.key));
        if (!is_model_name(member.key))
            map.report().add(member.location, fmt::format("model {}", in_quotes(member.key)),
                             "a model's name has 1 to 63 of A-Z a-z 0-9 . _ - and begins with a letter or digit");
        ModelSpec model = defaults;
        model.name = member.key;
        Fields keys{Value{member.value.shared(), where + "its value", map.report()}, where};
        if (!keys.is_map()) continue;
        read_model(keys, where, folder, check, model);
        workers += model.replicas;
        fleet.models.push_back(std::move(model));
    }
    for (const ModelSpec& model : fleet.models) {
        if (!model.group) continue;
        const auto other = std::ranges::find_if(fleet.models, [&](const ModelSpec& one) {
            return one.group && one.group->name == model.group->name && one.group->kind != model.group->kind;
        });
        if (other == fleet.models.end()) continue;
        map.refuse(fmt::format("group {} is {} by model {}, and {} by model {}", in_quotes(model.group->name),
                               word_of(model.group->kind), in_quotes(model.name), word_of(other->group->kind),
                               in_quotes(other->name)),
                   "give both the same kind, or name two groups");
        break;
    }
    if (workers > limits::workers_max)
        map.refuse(fmt::format("{} replicas of all models together", workers),
                   fmt::format("one daemon runs at most {}", limits::workers_max));
}

void read_root(const NodeRef& root, Report& report, FileCheck check, Fleet& fleet) {
    if (root->kind == Node::Kind::null) {
        report.add(root->location, "the file is empty", "begin with version: 1 and models:");
        return;
    }
    Fields fields{Value{root, "the file's value", report}, ""};
    if (!fields.is_map()) return;
    if (const auto version = fields.require(key::version, "add version: 1"))
        // Another version has other keys.
        if (!version->integer(1, 1) && !version->is_invalid()) return;
    ModelSpec defaults;
    if (const auto value = fields.take(key::defaults)) {
        Fields keys{*value, "defaults: "};
        read_settings(keys, "defaults: ", defaults);
        keys.finish();
    }
    if (const auto models = fields.require(key::models, "add models: with at least one model"))
        read_models(*models, defaults, check, fleet);
    read_fleet_settings(fields, fleet);
    fields.finish();
}

ReadFleet refused(const std::filesystem::path& file, std::string attempt, std::string remedy) {
    ReadFleet read;
    read.fleet.source = file;
    read.diagnostics.push_back({file, 0, 0, {ErrorCode::config_invalid, std::move(attempt), std::move(remedy)}});
    return read;
}

}  // namespace

std::string Diagnostic::text() const {
    std::string out = file.string();
    if (line > 0) out += fmt::format(":{}:{}", line, column);
    out += ": " + error.attempt;
    if (!error.remedy.empty()) out += "; " + error.remedy;
    return out;
}

ReadFleet read_fleet(const std::filesystem::path& file) {
    std::error_code failure;
    const auto status = std::filesystem::status(file, failure);
    if (status.type() == std::filesystem::file_type::not_found)
        return refused(file, "no such file", "check the path of the fleet file");
    if (status.type() != std::filesystem::file_type::regular)
        return refused(file, failure ? failure.message() : "not a regular file", "name a fleet file to read");
    std::ifstream stream{file, std::ios::binary};
    std::string text(limits::file_bytes_max + 1, '\0');  // one byte more than allowed shows that
                                                         // the file is too big
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!stream.eof() && stream.fail()) {
        const Error error = system_error("reading", errno);
        return refused(file, error.attempt, error.remedy);
    }
    text.resize(static_cast<std::size_t>(stream.gcount()));
    return read_fleet_text(text, file);
}

ReadFleet read_fleet_text(std::string_view yaml, const std::filesystem::path& name, FileCheck check) {
    ReadFleet read;
    read.text = yaml;
    std::error_code failure;
    read.fleet.source = std::filesystem::absolute(name, failure).lexically_normal();
    Report report{name, yaml};
    if (const NodeRef root = parse_yaml(yaml, report)) read_root(root, report, check, read.fleet);
    read.diagnostics = std::move(report).take();
    read.warnings = std::move(report).take_warnings();
    return read;
}

}  // namespace bulkhead::config
