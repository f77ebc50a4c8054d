#include "config/python_reader.h"

#include <algorithm>
#include <array>
#include <system_error>

#include "config/limits.h"

namespace bulkhead::config {
namespace {

constexpr std::array<std::string_view, 3> python_keys{"engine", "interpreter", "options"};
constexpr std::array<std::string_view, 3> foreign_keys{"file", "package", "methods"};

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

/// Relative to the fleet file's folder. Keeps symlinks: a venv's interpreter finds its venv through its own symlink.
std::optional<std::filesystem::path> existing_file(const Value& value, const std::string& text,
                                                   const std::filesystem::path& folder, FileCheck check) {
    std::filesystem::path path = (folder / text).lexically_normal();
    std::error_code failure;
    if (check == FileCheck::none || std::filesystem::is_regular_file(path, failure)) return path;
    value.refuse(fmt::format("{}: no file {}", value.what(), in_quotes(path.string())),
                 "correct the path; a relative one is taken from the folder of the fleet file");
    return std::nullopt;
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
    const auto file = existing_file(value, module, folder, check);
    if (!file) return;
    model.file = *file;
    model.python.engine = file->string() + text->substr(colon);
}

void read_interpreter(const Value& value, const std::filesystem::path& folder, FileCheck check, ModelSpec& model) {
    const auto text = value.text();
    if (!text) return;
    if (text->empty()) return value.refuse("write the path of a Python, such as ../venv/bin/python");
    if (auto path = existing_file(value, *text, folder, check)) model.python.interpreter = std::move(*path);
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

}  // namespace

void read_python(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                 ModelSpec& model) {
    const auto refuse = [&](std::string_view key, std::string_view remedy) {
        if (const auto place = fields.location_of(key))
            fields.report().add(*place, fmt::format("{}\"{}\" of runtime {}", where, key, word_of(model.runtime)),
                                std::string{remedy});
    };
    if (model.runtime != Runtime::python) {
        for (const std::string_view key : python_keys)
            if (fields.take(key)) refuse(key, "remove it: it belongs to runtime python");
        return;
    }
    if (const auto engine = fields.require("engine", "add engine: module:Class"))
        read_engine(*engine, folder, check, model);
    if (const auto interpreter = fields.take("interpreter")) read_interpreter(*interpreter, folder, check, model);
    if (const auto options = fields.take("options")) read_options(*options, model);
    for (const std::string_view key : foreign_keys) refuse(key, "remove it: the engine's class declares its methods");
    for (const std::string_view key : method_keys) refuse(key, "remove it: the engine's class declares its methods");
    if (model.state != StateScope::none) refuse("state", "remove it: an engine keeps its state itself");
    model.state = StateScope::none;  // even if the defaults differ
    model.methods.clear();
}

}  // namespace bulkhead::config
