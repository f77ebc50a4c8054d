#pragma once

#include <string>
#include <variant>
#include <vector>

#include <boost/json.hpp>

#include "clients/cli/npy.h"
#include "clients/cpp/channel.h"

/// What a command line says of a request, and what the model's description makes of it.
namespace bulkhead::cli {

struct Assignment {
    std::string name;
    std::string value;
};

/// "name=value", with a name.
[[nodiscard]] bool is_assignment(const std::string& text);
/// Of a text that is_assignment: the command line was checked when it was parsed.
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

/// Leases room for one input and fills it: a file's data are read straight into shared memory.
/// Errors  input_invalid for JSON where the method describes no such input; as `dims_of`, `fill`, `Channel::allocate`
[[nodiscard]] Result<Input> send_input(Channel& channel, const boost::json::value& method, const Source& source);

/// Of "name=value": JSON where it reads as JSON, else text; a parameter that is declared as a string is always text.
/// Errors  input_invalid for one that is given twice
[[nodiscard]] Result<boost::json::object> parse_parameters(const std::vector<std::string>& texts,
                                                           const boost::json::value& method);

}  // namespace bulkhead::cli
