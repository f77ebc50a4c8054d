#include <fmt/format.h>
#include <fmt/ranges.h>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/render.h"

namespace bulkhead::cli {
namespace {

std::string scalar_text(const json::value& parameter, std::string_view key) {
    const json::value& value = member(parameter, key);
    if (value.is_null()) return {};
    if (const auto* number = value.if_double()) return fmt::format("{}", *number);
    return json_text(value);
}

/// "float32 [1, samples=0..]": an unbounded range has no upper end.
std::string tensor_text(const json::value& tensor) {
    constexpr std::string_view unbounded = "9223372036854775807";
    std::vector<std::string> dims;
    for (const json::value& dim : array_member(tensor, "shape")) {
        std::string text = dim.is_string() ? std::string{dim.get_string()} : json_text(dim);
        if (text.ends_with(unbounded)) text.resize(text.size() - unbounded.size());
        dims.push_back(std::move(text));
    }
    return fmt::format("{} [{}]{}", text_member(tensor, "dtype"), fmt::join(dims, ", "),
                       bool_member(tensor, "optional") ? ", optional" : "");
}

/// "number, 0 to 2 in steps of 0.05, default 1".
std::string parameter_text(const json::value& parameter) {
    std::string text = text_member(parameter, "type");
    const std::string low = scalar_text(parameter, "minimum");
    const std::string high = scalar_text(parameter, "maximum");
    if (!low.empty() && !high.empty())
        text += fmt::format(", {} to {}", low, high);
    else if (!low.empty())
        text += ", at least " + low;
    else if (!high.empty())
        text += ", at most " + high;
    if (const std::string step = scalar_text(parameter, "step"); !step.empty()) text += " in steps of " + step;
    std::vector<std::string> choices;
    for (const json::value& choice : array_member(parameter, "choices"))
        choices.push_back(choice.is_string() ? std::string{choice.get_string()} : json_text(choice));
    if (!choices.empty()) text += fmt::format(", one of: {}", fmt::join(choices, ", "));
    if (const std::string value = scalar_text(parameter, "default"); !value.empty()) text += ", default " + value;
    return text;
}

}  // namespace

std::string render_methods(const json::object& methods, Style style) {
    Table table{{{"METHOD"}, {"KIND"}, {"NAME"}, {"TYPE"}, {"DESCRIPTION"}}};
    for (const auto& entry : methods) {
        const std::string_view name = entry.key();
        const json::value& method = entry.value();  // clang 14 cannot capture a
                                                    // structured binding below
        table.row({std::string{name}, bool_member(method, "streams") ? "streams" : "-", "-", "-",
                   text_member(method, "description")});
        const auto rows = [&](std::string_view members, const char* kind, const auto& type_text) {
            for (const json::value& one : array_member(method, members))
                table.row({"", kind, text_member(one, "name"), type_text(one), text_member(one, "description")});
        };
        rows("inputs", "input", tensor_text);
        rows("parameters", "parameter", parameter_text);
        rows("outputs", "output", tensor_text);
    }
    return table.text(style);
}

}  // namespace bulkhead::cli
