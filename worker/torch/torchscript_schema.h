#pragma once

#include <cstddef>
#include <variant>
#include <vector>

#include <ATen/core/function_schema.h>

#include "config/fleet.h"
#include "ipc/base/error.h"

namespace bulkhead::worker {

struct InputArgument {
    std::size_t index;  ///< among the method's inputs, then the outputs that it takes as arguments
};
struct ParameterArgument {
    std::size_t index;  ///< among the method's parameters
};
/// The source of each argument of a TorchScript method, in the schema's order, without `self`. An
/// IValue is the schema's own default.
using ArgumentSource = std::variant<InputArgument, ParameterArgument, c10::IValue>;

/// Matches a declared method with the file's by argument names; the declaration keeps its own
/// order. Adds the schema's undeclared parameters to `method`.
/// Errors  config_invalid naming the declaration and the file's schema
[[nodiscard]] Result<std::vector<ArgumentSource>> match_arguments(const c10::FunctionSchema& schema,
                                                                  config::MethodSpec& method);

/// "(Tensor x, int sr=16000) -> Tensor", without `self`.
[[nodiscard]] std::string describe(const c10::FunctionSchema& schema);

}  // namespace bulkhead::worker
