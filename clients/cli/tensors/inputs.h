#pragma once

#include <string>
#include <variant>
#include <vector>

#include <CLI/CLI.hpp>
#include <boost/json.hpp>

#include "bulkhead/channel.h"
#include "clients/cli/tensors/npy.h"

/// Parses a command line's request options, by the model's description.
namespace bulkhead::cli {

struct Assignment {
    std::string name;
    std::string value;
};

/// Lets an option be repeated, with one "name=value" each. `type` describes it in the
/// help: "NAME=DATA".
void take_assignments(CLI::Option* option, const char* type);
/// Makes an option take a duration such as 5s.
void take_duration(CLI::Option* option);

/// Splits a text that `take_assignments` accepted.
[[nodiscard]] Assignment split(const std::string& text);

/// The source of an input's numbers. Files are opened and checked before a model is
/// loaded for them.
struct Source {
    std::string name;
    std::variant<NpyFile, boost::json::value> data;
};

/// Parses "name=@FILE.npy" or "name=JSON".
/// Errors  input_invalid naming the input; those of NpyFile::open
[[nodiscard]] Result<std::vector<Source>> open_sources(const std::vector<std::string>& texts);

/// Finds a method in `welcome`'s description. Errors  method_unknown naming the known ones
[[nodiscard]] Result<const boost::json::value*> find_method(const Channel& channel, const std::string& name);

/// The inputs of one request.
struct Inputs {
    std::vector<Input> leased;
    std::vector<NamedInput> named;  ///< refer to `leased`, with the sources' names
};

/// Leases room for each source and fills it; a file's data are read straight into shared memory.
/// The names point into `sources`, which must outlive them.
/// Errors  input_invalid for JSON if the method describes no such input; as `dims_of`, `fill`,
///         `Channel::allocate`
[[nodiscard]] Result<Inputs> fill_inputs(Channel& channel, const boost::json::value& method,
                                         const std::vector<Source>& sources);

/// Parses "name=value": JSON if it parses as JSON, else text. A declared string is always text.
/// Errors  input_invalid for a repeated name
[[nodiscard]] Result<boost::json::object> parse_parameters(const std::vector<std::string>& texts,
                                                           const boost::json::value& method);

}  // namespace bulkhead::cli
