#include "clients/cli/commands/command.h"

int main(int argc, char** argv) { return bulkhead::cli::run(argc, argv); }
