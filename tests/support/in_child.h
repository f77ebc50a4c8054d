#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace bulkhead::test {

/// Runs `check` in a forked child. Returns its number, which is the child's exit status; 1000 more
/// than the signal that killed it.
int in_child(const auto& check) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(check());
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace bulkhead::test
