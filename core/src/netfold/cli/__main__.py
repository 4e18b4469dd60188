from netfold.cli import main

main()
