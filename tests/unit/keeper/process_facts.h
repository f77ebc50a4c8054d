#pragma once

#include <sys/types.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "ipc/base/unique_fd.h"
#include "tests/support/file_text.h"

/// What /proc tells about another process.
namespace bulkhead::test {

/// A descriptor's number and what it leads to: {3, "socket:[4711]"}.
std::map<int, std::string> descriptors_of(pid_t pid);
std::size_t descriptor_count(pid_t pid);

/// Zombies included.
std::set<pid_t> children_of(pid_t pid);

/// A line of /proc/PID/status without its name: status_of(pid, "Threads") is "1".
std::string status_of(pid_t pid, const std::string& name);

/// The zero-separated words of /proc/PID/cmdline or environ.
std::vector<std::string> words_of(pid_t pid, const std::string& file);

/// Taken while the process surely lives; then it cannot be mistaken for another.
UniqueFd hold(pid_t pid);

/// Waits for the end of a process that `hold` holds. False when it lives on for 20 s.
bool ends(const UniqueFd& pidfd);
bool is_alive(const UniqueFd& pidfd);

/// Waits, at most 20 s, until the descriptor can be read or has hung up.
bool readable(int fd);

}  // namespace bulkhead::test
