#pragma once

#include <string>

#include "ipc/base/error.h"
#include "ipc/links/keeper_link.h"

namespace bulkhead::supervisor {

/// The option that makes the next program introduce itself: `bulkhead-supervisor --check FLEET`.
inline constexpr const char* check_option = "--check";

/// The program's answer to `check_option`: one line with its versions of the keeper link.
[[nodiscard]] std::string introduction();

/// Returns the program that the keeper starts next: the path of this one or, after an upgrade of
/// the keeper, the one beside the keeper's new program.
[[nodiscard]] std::string next_program(bool with_keeper);

/// Runs that program as a child to check that it can read the fleet. After a hand-over to a broken
/// program there would be no way back.
///
/// Thread  any but the loop's
/// Blocks  until it has ended, at most `limits::next_supervisor_deadline`
/// Errors  the program's own, if it printed one; config_invalid for the fleet file (in its words);
///         load_failed if it cannot run, prints anything else, or speaks no version of the keeper's
///         from `min` to `max`
[[nodiscard]] Result<> check_next(const std::string& program, const std::string& fleet, std::uint16_t min,
                                  std::uint16_t max);

}  // namespace bulkhead::supervisor
