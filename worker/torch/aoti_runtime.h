#pragma once

#include <cstddef>
#include <memory>

#include "config/fleet.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// Throws  ErrorException (config_invalid) if the declaration does not fit a package with this
///         number of inputs
void check_package_declaration(const config::ModelSpec& spec, std::size_t input_count);

/// The function as a model's only method.
[[nodiscard]] std::unique_ptr<Runtime> make_aoti_runtime(std::unique_ptr<Function> function);

/// Call it before compiled code runs.
void listen_for_words();
/// Call it in a catch block. Throws the message that the model has printed since, or rethrows if
/// it printed none.
[[noreturn]] void rethrow_in_own_words();

}  // namespace bulkhead::worker
