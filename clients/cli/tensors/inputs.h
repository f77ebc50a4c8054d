#pragma once

#include <string>
#include <variant>
#include <vector>

#include <CLI/CLI.hpp>
#include <boost/json.hpp>

#include "bulkhead/channel.h"
#include "clients/cli/tensors/npy.h"

/// What a command line says of a request: how its options read, and what the model's description makes of it.
namespace bulkhead::cli {

struct Assignment {
    std::string name;
    std::string value;
};

/// Lets an option be given many times, a "name=value" each. `type` says so in the help: "NAME=DATA".
void take_assignments(CLI::Option* option, const char* type);
/// Lets an option take a duration alone, such as 5s.
void take_duration(CLI::Option* option);

/// Of one that `take_assignments` let through.
[[nodiscard]] Assignment split(const std::string& text);

/// Where an input's numbers come from; files are open and checked before a model is loaded for them.
struct Source {
    std::string name;
    std::variant<NpyFile, boost::json::value> data;
};

/// Of "name=@FILE.npy" or "name=JSON". Errors  input_invalid naming the input; those of NpyFile::open
[[nodiscard]] Result<std::vector<Source>> open_sources(const std::vector<std::string>& texts);

/// As `welcome` describes it. Errors  method_unknown naming those there are
[[nodiscard]] Result<const boost::json::value*> find_method(const Channel& channel, const std::string& name);

/// The inputs of one request.
struct Inputs {
    std::vector<Input> leased;
    std::vector<NamedInput> named;  ///< those of `leased`, under the names of their sources
};

/// Leases room for each source and fills it: a file's data are read straight into shared memory. The names are those of
/// `sources`, which therefore outlive them.
/// Errors  input_invalid for JSON where the method describes no such input; as `dims_of`, `fill`, `Channel::allocate`
[[nodiscard]] Result<Inputs> fill_inputs(Channel& channel, const boost::json::value& method,
                                         const std::vector<Source>& sources);

/// Of "name=value": JSON where it reads as JSON, else text; a parameter that is declared as a string is always text.
/// Errors  input_invalid for one that is given twice
[[nodiscard]] Result<boost::json::object> parse_parameters(const std::vector<std::string>& texts,
                                                           const boost::json::value& method);

}  // namespace bulkhead::cli
