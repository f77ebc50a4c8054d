#pragma once

#include <cstddef>
#include <memory>

#include "config/fleet.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

class Function;

/// Call it before a package is loaded. Packages then check dtype and shape of their inputs at each
/// run (else they would read garbage), and their error messages are captured.
void prepare_for_aoti();

/// Throws  ErrorException (config_invalid) if the declaration does not fit a package with this
///         number of inputs
void check_package_declaration(const config::ModelSpec& spec, std::size_t input_count);

/// The function as a model's only method.
[[nodiscard]] std::unique_ptr<Runtime> make_aoti_runtime(std::unique_ptr<Function> function);

/// Call it in a catch block. Throws the message that the model printed, or rethrows if
/// it printed none.
[[noreturn]] void rethrow_in_own_words();

}  // namespace bulkhead::worker
