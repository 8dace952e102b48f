from e2e.commands.cli import main

main()
