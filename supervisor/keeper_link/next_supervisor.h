#pragma once

#include <string>

#include "ipc/base/error.h"
#include "ipc/links/keeper_link.h"

namespace bulkhead::supervisor {

/// The option by which one supervisor asks the program of the next: `bulkhead-supervisor --check FLEET`.
inline constexpr const char* check_option = "--check";

/// What a program says of itself to `check_option`: one line, with the versions of the keeper link that it speaks.
[[nodiscard]] std::string introduction();

/// The program that the keeper starts next: where it started this one, or after an upgrade of the keeper beside the
/// program that is then the keeper's.
[[nodiscard]] std::string next_program(bool with_keeper);

/// Asks that program, in a process of its own, whether it would get as far as reading the fleet. After a hand-over to
/// one that would not, nobody is there to go back.
///
/// Thread  any but the loop's
/// Blocks  until it has ended, `limits::next_supervisor_deadline` at most
/// Errors  its own, where it told one; config_invalid when the fleet file is (then, in its words); load_failed when it
///         cannot run, says something else, or speaks no version of the keeper's from `min` to `max`
[[nodiscard]] Result<> check_next(const std::string& program, const std::string& fleet, std::uint16_t min,
                                  std::uint16_t max);

}  // namespace bulkhead::supervisor
